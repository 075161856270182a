"""The head of a real Ray cluster on one machine, and the driver, are killed or stopped; the run resumes on a new one.

    .frameworks/cluster/bin/python benchmarks/cluster_head_kills.py     writes cluster_head_kills.json

A run of 12 steps in the process of `april train`, its engine on a node of a cluster whose head it is connected to.
The faults: SIGKILL or SIGSTOP of all of the head's processes or of Ray's GCS alone, SIGKILL of the driver, or of both,
each equally often. A third of the faults happen at a random moment of a start; the rest at a random moment within a
second after the current life has begun to train on its first to sixth step. The run must end without an operator, and
leave no process on any node; `april resume` continues on a new cluster. When a run has finished, the next one begins,
up to the given number of faults. A step's rewards take over three seconds, so that a run does not end before a loss is
noticed. Steps are collected synchronously, so their groups do not depend on time.

Compared with an undisturbed run: the groups of every step, for each time that it was trained on, with all their tokens,
versions and rewards, exactly; and metrics that do not depend on the clock, to 1e-4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.ranks.losses import LEDGER, STEPS, note_steps, outcome, unlike  # noqa: E402
from tests.ranks.runs import materials  # noqa: E402

KINDS = (
    "head killed",
    "head hung",
    "its GCS killed",
    "its GCS hung",
    "driver killed",
    "driver and head killed",
)
MOST_STEPS = 6
"""That a life begins to train on before it is struck."""
LAST = 1200.0
"""Seconds in which a life that nothing strikes has to end."""
HUNG = 120.0
"""Seconds after which a driver that has lost its head, or a process that it left behind, counts as hung."""
LEFT = 180.0
"""Seconds after which an engine counts as left behind. Ray's node waits a minute for its head, and then sometimes the
engine one for its node."""
GROUPS = 4


def drive(arguments: list[str]) -> None:
    """`april` with these arguments; what each step is trained on is noted."""
    from april.commands.main import main
    from april.training.local import LocalLearner

    note_steps(LocalLearner)
    sys.argv[1:] = arguments
    main()


@dataclass(frozen=True)
class Blow:
    """One that is to fall.

    Args:
        steps: that the present life has begun to train on; none: it falls while the run starts.
        part: of a second after that; of the start.
    """

    kind: str
    steps: int
    part: float


def drawn(rng: random.Random) -> Iterator[Blow]:
    """Endless faults, equally many of each kind."""
    while True:
        for kind in rng.sample(KINDS, len(KINDS)):
            yield Blow(kind, 0 if rng.random() < 1 / 3 else rng.randint(1, MOST_STEPS), rng.random())


class Clusters:
    """Each of a head and a node. One that is done with is watched until no engine is left on it."""

    def __init__(self) -> None:
        self._networks = itertools.cycle(range(1, 250))
        self._starter = ThreadPoolExecutor(1)
        self._next: Future[Any] | None = None
        self._leaving: list[threading.Thread] = []
        self.engines_gone: dict[str, list[float]] = {}
        """Seconds from the driver's end until none was left, by the kind of the blow."""
        self.left: list[str] = []

    def prepare(self) -> None:
        """Begin to start the one that `another` returns."""
        self._next = self._next or self._starter.submit(self._start)

    def another(self) -> Any:
        self.prepare()
        assert self._next is not None
        cluster, self._next = self._next.result(), None
        return cluster

    def _start(self) -> Any:
        from tests.cluster.raylets import Raylets

        cluster = Raylets(reaped=False, network=next(self._networks))
        try:
            cluster.add()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def leave(self, cluster: Any, known: set[int], kind: str) -> None:
        """End the remaining processes of a cluster, once its engines (`known`) have ended by themselves."""
        thread = threading.Thread(target=self._leave, args=(cluster, known, kind))
        thread.start()
        self._leaving.append(thread)

    def _leave(self, cluster: Any, known: set[int], kind: str) -> None:
        began = time.monotonic()
        with suppress(TimeoutError):
            wait(lambda: not engines_among(known | set(cluster.engines())), LEFT)
        if left := engines_among(known | set(cluster.engines())):
            self.left.append(f"{kind}: {len(left)} engines after {LEFT:g} s")
        else:
            self.engines_gone.setdefault(kind, []).append(round(time.monotonic() - began, 1))
        cluster.close()

    def close(self) -> None:
        for thread in self._leaving:
            thread.join()
        if self._next is not None:
            self._next.result().close()


def wait(condition: Callable[[], Any], seconds: float = HUNG) -> None:
    given_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > given_up:
            raise TimeoutError
        time.sleep(0.1)


def engines_among(pids: set[int]) -> set[int]:
    from tests.cluster.raylets import ENGINES
    from tests.processes import processes

    alive = processes()
    return {pid for pid in pids if alive.get(pid, (0, ""))[1].startswith(ENGINES)}


def started_by(ledger: Path) -> set[int]:
    """The processes that a driver of this run has started, and itself."""
    mark, found = f"{LEDGER}={ledger}".encode(), set()
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                found.add(int(directory.name))
    return found


class Run:
    """A run of `STEPS` steps in `base`, on one cluster after the other."""

    def __init__(self, base: Path, name: str, clusters: Clusters) -> None:
        self.base, self.name, self.clusters = base, name, clusters
        self.ledger = base / f"{name}-ledger"
        self.ledger.mkdir()
        self.log = base / f"{name}.log"
        self.blows: list[dict[str, Any]] = []
        self.starts = 0

    def go_on(self, blow: Blow | None, start: float = 0.0) -> bool:
        """A life on a new cluster, which a blow falls on; whether the run has come to its end before.

        Args:
            start: seconds that a start takes.
        """
        cluster = self.clusters.another()
        began, before = time.monotonic(), self.trained
        process, known, kind = self._start(cluster.address), set[int](), "none"
        try:
            if blow is not None and self._struck(blow, process, before, began + blow.part * start):
                known, kind = set(cluster.engines()), blow.kind
                self.clusters.prepare()
                self._strike(blow, cluster, process, began, before)
                return False
            assert process.wait(LAST) == 0, self.log.read_text()
            return True
        finally:
            process.kill()
            self.clusters.leave(cluster, known, kind)

    def _struck(self, blow: Blow, process: Any, before: int, moment: float) -> bool:
        """Wait for the moment of a blow, of one in the start `moment`; whether it came before the run's end."""
        while self.trained - before < blow.steps if blow.steps else time.monotonic() < moment:
            if process.poll() is not None:
                return False
            time.sleep(0.02)
        if blow.steps:
            time.sleep(blow.part)
        return process.poll() is None

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        begun = (self.base / self.name / "recipe.json").exists()
        what = ["resume", self.base / self.name] if begun else ["train", recipe_in(self.base, self.name)]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, LEDGER: str(self.ledger)}
        command = [sys.executable, __file__, "--drive", *map(str, what), "--cluster.address", address]
        self.starts += 1
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def _strike(self, blow: Blow, cluster: Any, process: Any, began: float, before: int) -> None:
        struck, steps, kind = time.monotonic(), self.trained - before, blow.kind
        if "head" in kind or "GCS" in kind:
            number = signal.SIGSTOP if kind.endswith("hung") else signal.SIGKILL
            cluster.signal_head(number, *(["gcs_server"] if "GCS" in kind else []))
        if "driver" in kind:
            process.kill()
        try:
            status = process.wait(HUNG)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{kind}: the driver has not ended in {HUNG:g} s:\n{self.log.read_text()}") from None
        ended = time.monotonic() - struck
        if kind.endswith("hung"):
            cluster.signal_head(signal.SIGKILL)
        with suppress(TimeoutError):
            wait(lambda: not started_by(self.ledger))
        if left := started_by(self.ledger):
            self.clusters.left.append(f"{kind}: {len(left)} processes of the driver")
        fallen = {"kind": kind, "after": round(struck - began, 1), "steps_since_start": steps}
        self.blows.append({**fallen, "driver_ended": round(ended, 1), "status": status})
        print(self.blows[-1], flush=True)

    @property
    def trained(self) -> int:
        """How often it has trained on a step."""
        return len(list(self.ledger.glob("*.json")))


RECIPE = """
[model]
path = "{model}"
device = "cpu"
[task]
kind = "records"
path = "{data}"
eval_size = 2
reward = "tests.ranks.rewards:slowly"
[rollout]
rollout_batch_size = {groups}
over_sampling_batch_size = {groups}
n_samples_per_prompt = 4
max_response_length = 200
max_staleness = 0
reward_workers = 1
[engine]
context_length = 256
[cluster]
replicas = 1
[algorithm]
kl_coef = 0.0
[training]
steps = {steps}
threads = 1
learning_rate = 1e-3
eval_interval = 0
save_interval = 3
[reporting]
output = "{output}"
trackers = []
"""


def recipe_in(base: Path, name: str) -> Path:
    path = base / f"{name}.toml"
    path.write_text(RECIPE.format(**materials(base), output=base / name, groups=GROUPS, steps=STEPS))
    return path


def strike(blows: int, seconds: float, seed: int, save: Callable[[dict[str, Any]], None]) -> bool:
    """Strike so often, or as often as there is time for; whether all was well."""
    coming, deadline = drawn(random.Random(seed)), time.monotonic() + seconds
    clusters = Clusters()
    done: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        try:
            calm = Run(base, "calm", clusters)
            began = time.time()
            assert calm.go_on(None)
            start = min(path.stat().st_mtime for path in calm.ledger.iterdir()) - began
            expected = outcome(base, "calm")
            assert len(expected["steps"]) == STEPS
            blow = next(coming)
            while len(done) < blows and time.monotonic() < deadline:
                run, through = Run(base, f"run-{len(runs) + 1}", clusters), False
                while not through:
                    going_on = len(done) < blows and time.monotonic() < deadline
                    through = run.go_on(blow if going_on else None, start)
                    if not through:
                        done.append(run.blows[-1])
                        blow = next(coming)
                        save(_found(clusters, start, done, runs))
                again = run.trained - STEPS
                wrong = unlike(outcome(base, run.name), expected)
                found = {"blows": len(run.blows), "starts": run.starts, "steps_trained_again": again}
                runs.append({**found, "unlike_undisturbed": wrong})
                print(runs[-1], flush=True)
        finally:
            clusters.close()
    save(_found(clusters, start, done, runs))
    return not clusters.left and not any(run["unlike_undisturbed"] for run in runs)


def _found(clusters: Clusters, start: float, done: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    import ray
    from record import machine, spread

    return {
        "command": " ".join(["benchmarks/cluster_head_kills.py", *sys.argv[1:]]),
        "machine": machine() | {"ray": ray.__version__},
        "start_seconds": round(start, 1),
        "blows": len(done),
        "while_steps_went_on": sum(blow["steps_since_start"] > 0 for blow in done),
        "by_kind": {kind: summary([blow for blow in done if blow["kind"] == kind]) for kind in KINDS},
        "steps_of_each": STEPS,
        "runs": len(runs),
        "runs_equal": sum(not run["unlike_undisturbed"] for run in runs),
        "left_behind": clusters.left,
        "engines_gone_seconds": {kind: spread(gone) for kind, gone in sorted(clusters.engines_gone.items())},
        "each_run": runs,
        "each_blow": done,
    }


def summary(blows: list[dict[str, Any]]) -> dict[str, Any]:
    starting = [blow for blow in blows if not blow["steps_since_start"]]
    going_on = [blow for blow in blows if blow["steps_since_start"]]
    return {"count": len(blows), "in_a_start": _ends(starting), "while_steps_went_on": _ends(going_on)}


def _ends(blows: list[dict[str, Any]]) -> dict[str, Any]:
    if not blows:
        return {"count": 0}
    ended = [blow["driver_ended"] for blow in blows]
    times = {"driver_ended_median": round(statistics.median(ended), 1), "driver_ended_max": max(ended)}
    return {"count": len(blows), **times, "statuses": sorted({blow["status"] for blow in blows})}


def main() -> int:
    if sys.argv[1:2] == ["--drive"]:
        drive(sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blows", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no blow after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()

    def save(found: dict[str, Any]) -> None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")

    return int(not strike(options.blows, options.seconds, options.seed, save))


if __name__ == "__main__":
    sys.exit(main())
