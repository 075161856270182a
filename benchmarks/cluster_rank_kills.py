"""The trainer's ranks on nodes of a real Ray cluster on one machine are killed and stopped, alone and with their nodes.

    .frameworks/cluster/bin/python benchmarks/cluster_rank_kills.py     writes cluster_rank_kills.json

A run of 12 steps on two ranks, the second one on a node, its engine on a node, too; each node has room for both. At
random moments, also while ranks restart: SIGKILL or SIGSTOP, of the first rank, of the program of the second one, of
the actor that watches it, or of all processes on its node. A killed node is replaced by another one; a stopped node is
killed later, or resumes. When the run has ended the next one begins, up to the given number of faults. Steps are
collected synchronously, so their groups do not depend on time.

Compared with an undisturbed run on the same nodes: the groups of every step, for each time that it was trained on, with
all their tokens, versions and rewards, exactly; and metrics that do not depend on the clock, to 1e-4, since an engine
that resumes a response computes in a different order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from record import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from april.config.recipe import Recipe  # noqa: E402
from april.reporting.metrics_log import last_step  # noqa: E402
from tests.cluster.raylets import Raylets  # noqa: E402
from tests.processes import processes  # noqa: E402
from tests.ranks.losses import STEPS, outcome, recipe_of, start, unlike  # noqa: E402
from tests.ranks.runs import rank_of  # noqa: E402

KINDS = (
    "first rank killed",
    "first rank hung",
    "rank on a node killed",
    "rank on a node hung",
    "its actor killed",
    "its actor hung",
    "its node killed",
    "its node hung, then killed",
    "its node hung, then goes on",
)
SILENCE = 40.0
"""Seconds without a sign of life after which a rank has hung; more than a busy machine lets one wait."""
BETWEEN = 45.0
"""Seconds between two blows at most."""
HUNG = 15.0
"""Seconds that a node hangs: longer than it may be silent."""
LAST = 1200.0
"""Seconds in which a run that is not disturbed any more has to end."""


class Blows:
    """Faults of the runs and their outcomes."""

    def __init__(self, raylets: Raylets, rng: random.Random) -> None:
        self.raylets, self.rng = raylets, rng
        self.kinds: Counter[str] = Counter()
        self._hung: list[tuple[float, bool, Any]] = []
        """Nodes that hang: until when, and whether they are killed then."""

    def disturb(self, process: subprocess.Popen[str], most: int, deadline: float) -> None:
        """Strike at most so often, until a run ends."""
        begun = self.kinds.total()
        after = time.monotonic() + self.rng.uniform(0, BETWEEN)
        while process.poll() is None:
            self._end_hanging()
            now = time.monotonic()
            if self.kinds.total() - begun >= most or now > deadline:
                break
            if now > after and (kind := self._strike(process)):
                self.kinds[kind] += 1
                after = now + self.rng.uniform(0, BETWEEN)
                print(f"{self.kinds.total()}: {kind}", flush=True)
            time.sleep(0.2)
        given_up = time.monotonic() + LAST
        while process.poll() is None or self._hung:
            self._end_hanging()
            assert time.monotonic() < given_up, "the run does not end"
            time.sleep(0.2)

    def _strike(self, process: subprocess.Popen[str]) -> str:
        """The kind of fault; none if its target is between two lives."""
        kind = self.rng.choice(KINDS)
        number = signal.SIGKILL if kind.endswith("killed") and "hung" not in kind else signal.SIGSTOP
        with suppress(AssertionError, ProcessLookupError):
            if kind.startswith("first"):
                os.kill(rank_of(process, 0), number)
                return kind
            node, rank = next(self._ranks(), (None, 0))
            if node is None or any(node is hangs for _, _, hangs in self._hung):
                return ""
            if "node" not in kind:
                os.kill(processes()[rank][0], number)
            elif kind.startswith("rank"):
                os.kill(rank, number)
            elif number == signal.SIGKILL:
                self._kill(node)
            else:
                self.raylets.signal(node, number)
                self._hung.append((time.monotonic() + HUNG, kind.endswith("killed"), node))
            return kind
        return ""

    def _ranks(self) -> Iterator[tuple[Any, int]]:
        """The ranks on nodes, and those nodes."""
        for node in self.raylets.nodes:
            for rank in self.raylets.ranks(node):
                yield node, rank

    def _kill(self, node: Any) -> None:
        self.raylets.kill(node)
        self.raylets.add(2)

    def _end_hanging(self) -> None:
        for over in [each for each in self._hung if each[0] < time.monotonic()]:
            self._hung.remove(over)
            _, dies, node = over
            if dies:
                self._kill(node)
            else:
                self.raylets.signal(node, signal.SIGCONT)


def recipe_on(raylets: Raylets, base: Path, name: str) -> Recipe:
    recipe = recipe_of(base, name, SILENCE)
    recipe.rollout.over_sampling_batch_size, recipe.rollout.max_staleness = recipe.rollout.rollout_batch_size, 0
    recipe.cluster.address, recipe.cluster.ranks, recipe.cluster.replicas = raylets.address, "nodes", 1
    return recipe


def run(raylets: Raylets, base: Path, name: str, blows: Blows, most: int, deadline: float) -> dict[str, Any]:
    """One run to its end, and its faults."""
    before, began = blows.kinds.total(), time.monotonic()
    process = start(base, name, recipe_on(raylets, base, name))
    try:
        blows.disturb(process, most, deadline)
    finally:
        process.kill()
    said = (base / f"{name}.log").read_text()
    assert process.wait() == 0, said
    print(f"{name}: {last_step(base / name)} steps, {time.monotonic() - began:.0f} s\n{said}", flush=True)
    return {
        "blows": blows.kinds.total() - before,
        "starts_anew": said.count("ranks restart"),
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blows", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no blow after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    raylets = Raylets()
    blows = Blows(raylets, random.Random(options.seed))
    runs: list[dict[str, Any]] = []
    try:
        for _ in range(3):
            raylets.add(2)
        with tempfile.TemporaryDirectory() as place:
            base = Path(place)
            calm = run(raylets, base, "calm", blows, 0, deadline)
            expected = outcome(base, "calm")
            assert len(expected["steps"]) == STEPS
            while (left := options.blows - blows.kinds.total()) > 0 and time.monotonic() < deadline:
                name = f"run-{len(runs) + 1}"
                found = run(raylets, base, name, blows, left, deadline)
                runs.append({**found, "unlike_undisturbed": unlike(outcome(base, name), expected)})
                summary = {
                    "command": " ".join(["benchmarks/cluster_rank_kills.py", *sys.argv[1:]]),
                    "machine": machine() | {"ray": ray.__version__},
                    "blows": blows.kinds.total(),
                    "by_kind": {kind: blows.kinds[kind] for kind in KINDS},
                    "starts_anew": sum(each["starts_anew"] for each in runs),
                    "runs": len(runs),
                    "runs_equal": sum(not each["unlike_undisturbed"] for each in runs),
                    "steps_of_each": STEPS,
                    "undisturbed_seconds": calm["seconds"],
                    "seconds_median": statistics.median(each["seconds"] for each in runs),
                    "each": runs,
                }
                options.output.write_text(json.dumps(summary, indent=2) + "\n")
                print(json.dumps(summary, indent=2), flush=True)
    finally:
        raylets.close()


if __name__ == "__main__":
    main()
