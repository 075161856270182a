"""Lose ranks at random moments, by SIGKILL and SIGSTOP, and compare each run's end with an undisturbed run.

    python -m tests.ranks.losses --losses 50 --json benchmarks/rank_losses.json

A run of 12 steps on two ranks is disturbed until it ends, then the next run begins, until the given number of ranks
was lost. The comparison covers the groups of every step with all their tokens, versions and rewards, exactly, for each
time that a step was trained on; and, to `ROUNDING`, the tokens' log-probabilities and the metrics that do not depend on
the clock. Keys and values of a sample that resumes after a restart are recomputed, many tokens in a pass instead of
one, and sums are rounded differently there. For a run that differs, the first difference is kept, with the signals
that it received; `--keep` keeps the runs themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from april.config.reading import load_recipe
from april.config.recipe import Recipe, recipe_from_dict
from april.reporting.metrics_log import last_step
from april.rollout.trajectory.sample import Sample
from april.training import rank_group, rank_launcher
from april.training.rank_supervisor import RankSupervisor
from tests.ranks.launch import ROOT
from tests.ranks.runs import rank_of, recipe_in, trained

LEDGER = "APRIL_LEDGER"
STEPS = 12
SILENCE = 30.0
"""Seconds without a heartbeat after which a rank has hung; more where the undisturbed run takes longer altogether:
a rank that starts on a busy machine is silent for long."""
ROUNDING = 1e-5
"""By which log-probabilities and metrics may differ."""


def rank() -> int:
    """One of the ranks; the first one notes what each step is trained on."""
    from april.commands.rank import main as rank_main
    from april.training.distributed_learner import DistributedLearner

    note_steps(DistributedLearner)
    return rank_main()


def note_steps(trains: Any) -> None:
    """Have the method `train` of a class note what each step is trained on, in two files for each time."""
    from april.disk import write_whole
    from april.rollout.batch import RolloutBatch

    train, ledger = trains.train, Path(os.environ[LEDGER])

    def noted(self: Any, step: RolloutBatch, number: int) -> dict[str, float]:
        groups = [{"id": group.id, "samples": [_content(sample) for sample in group.samples]} for group in step.groups]
        logprobs = [[[float(p) for p in sample.logprobs] for sample in group.samples] for group in step.groups]
        names = (ledger / f"{number}-{life}.json" for life in itertools.count())
        name = next(name for name in names if not name.exists())
        write_whole(name.with_suffix(".logprobs"), json.dumps(logprobs))
        write_whole(name, json.dumps(groups))
        found: dict[str, float] = train(self, step, number)
        return found

    trains.train = noted


def _content(sample: Sample) -> dict[str, Any]:
    """The values that must be equal bit for bit."""
    return {
        "index": sample.index,
        "tokens": sample.response_ids,
        "versions": sample.versions.tolist(),
        "reward": sample.reward,
        "finish": str(sample.finish),
    }


def run_agent(recipe: dict[str, Any]) -> int:
    rank_launcher.COMMAND = [sys.executable, "-m", "tests.ranks.losses", "--part", "rank"]
    rank_group.GRACE_SECONDS = 4.0
    return RankSupervisor(recipe_from_dict(recipe)).run()


def recipe_of(base: Path, name: str, silence: float) -> Recipe:
    """A run's, which ranks may be lost in as often as one likes.

    Args:
        silence: seconds without a heartbeat after which a rank has hung.
    """
    recipe = load_recipe(recipe_in(base, name))
    recipe.training.steps, recipe.training.save_interval = STEPS, 3
    recipe.trainer.rank_timeout, recipe.trainer.max_restarts = silence, 1000
    return recipe


def start(base: Path, name: str, recipe: Recipe) -> subprocess.Popen[str]:
    """A run with its supervisor."""
    (base / f"{name}-ledger").mkdir()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, LEDGER: str(base / f"{name}-ledger")}
    command = [sys.executable, "-m", "tests.ranks.losses", "--part", "agent", json.dumps(recipe.to_dict())]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": (base / f"{name}.log").open("w")}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def passes(base: Path, name: str) -> dict[str, Any]:
    """What a finished run was trained on, each time, and its metrics."""
    steps: dict[str, list[Any]] = {}
    for path in sorted((base / f"{name}-ledger").glob("*.json"), key=lambda path: [*map(int, path.stem.split("-"))]):
        found = {"groups": path, "log-probabilities": path.with_suffix(".logprobs")}
        content = {part: json.loads(file.read_text()) for part, file in found.items()}
        steps.setdefault(f"step {path.stem.partition('-')[0]}", []).append(content)
    return {"steps": steps, "metrics": trained(base / name)}


def outcome(base: Path, name: str) -> dict[str, Any]:
    """What a finished run was trained on, the same as often as it was, and its metrics."""
    found = passes(base, name)
    steps = {}
    for step, (once, *again) in found["steps"].items():
        steps[step] = once["groups"]
        assert all(each["groups"] == once["groups"] for each in again), f"{name}: {step} was not the same again"
    return {**found, "steps": steps}


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Differences of a run's `outcome` from the undisturbed outcome; metrics to 1e-4."""
    wrong = [step for step, content in expected["steps"].items() if found["steps"].get(step) != content]
    for row, other in zip(found["metrics"], expected["metrics"], strict=False):
        far = [name for name, value in row.items() if not math.isclose(value, other[name], rel_tol=1e-4, abs_tol=1e-6)]
        wrong += [f"{name} of step {row['step']}" for name in far]
    if len(found["metrics"]) != STEPS or len(found["steps"]) != STEPS:
        wrong.append(f"{len(found['steps'])} steps, {len(found['metrics'])} lines of metrics")
    return wrong


def difference(expected: dict[str, Any], found: dict[str, Any], rounding: float) -> dict[str, Any] | None:
    """Where a run is first something else than the undisturbed one, which trained on each step once."""
    for number in expected["steps"]:
        (once,) = expected["steps"][number]
        for before, again in enumerate(found["steps"].get(number, [None])):
            if at := _first(once, again, number, rounding):
                return {**at, "trained on before": before}
    return _first(expected["metrics"], found["metrics"], "metrics", rounding)


def _first(expected: Any, found: Any, where: str, rounding: float) -> dict[str, Any] | None:
    """The first place in JSON values where they are not equal; groups have to be so to the bit."""
    rounding = 0.0 if where.endswith(".groups") else rounding
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = ((expected[key], found[key], f"{where}.{key}") for key in expected)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = ((*pair, f"{where}[{index}]") for index, pair in enumerate(zip(expected, found, strict=True)))
    elif isinstance(expected, float) and isinstance(found, float) and abs(expected - found) <= rounding:
        return None
    else:
        return None if expected == found else {"where": where, "expected": expected, "found": found}
    return next((at for pair in pairs if (at := _first(*pair, rounding))), None)


def disturb(
    process: subprocess.Popen[str], run: Path, most: int, between: float, deadline: float
) -> list[dict[str, Any]]:
    """Lose at most this many ranks of a run until it ends, at most `between` seconds apart; return which ranks, how and
    after which step."""
    lost: list[dict[str, Any]] = []
    while len(lost) < most and time.monotonic() < deadline:
        try:
            process.wait(random.uniform(0, between))
            break
        except subprocess.TimeoutExpired:
            pass
        chosen, number = random.choice((signal.SIGKILL, signal.SIGSTOP)), random.randrange(2)
        try:
            os.kill(rank_of(process, number), chosen)
        except (AssertionError, ProcessLookupError):
            continue  # between two lives
        lost.append({"signal": chosen.name, "rank": number, "after step": last_step(run)})
    return lost


def lose(losses: int, seconds: float, seed: int = 0, keep: Path | None = None) -> dict[str, Any]:
    """Lose this many ranks, or the number that the time allows; the runs stay in `keep`."""
    random.seed(seed)
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = dict.fromkeys(("SIGKILL", "SIGSTOP", "restarts", "runs", "equal", "equal_to_the_bit"), 0)
    found |= {"rounded": [], "differing": []}
    with tempfile.TemporaryDirectory() as place:
        base = keep or Path(place)
        base.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        calm = start(base, "calm", recipe_of(base, "calm", 1200.0))
        assert calm.wait(1200) == 0, (base / "calm.log").read_text()
        whole = time.monotonic() - began  # a loss may come at any time of a run, on a busy machine, too
        expected = passes(base, "calm")
        assert len(expected["steps"]) == STEPS
        while (left := losses - found["SIGKILL"] - found["SIGSTOP"]) > 0 and time.monotonic() < deadline:
            name = f"run-{found['runs']}"
            process = start(base, name, recipe_of(base, name, max(SILENCE, whole)))
            lost = disturb(process, base / name, left, whole, deadline)
            for each in lost:
                found[each["signal"]] += 1
            status, said = process.wait(1200), (base / f"{name}.log").read_text()
            assert status == 0, said
            found["runs"] += 1
            found["restarts"] += said.count("ranks restart")
            ended = passes(base, name)
            differs, rounded = (difference(expected, ended, by) for by in (ROUNDING, 0.0))
            found["equal"] += differs is None
            found["equal_to_the_bit"] += rounded is None
            for kind, at in (("differing", differs), ("rounded", None if differs else rounded)):
                if at:
                    found[kind].append({"run": name, **at, "lost": lost})
            print(found, file=sys.stderr, flush=True)
    return {"steps": STEPS, "losses": found["SIGKILL"] + found["SIGSTOP"], **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "agent", "rank"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("recipe", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin nothing after that")
    parser.add_argument("--seed", type=int, default=0, help="of which rank is lost how and when")
    parser.add_argument("--keep", type=Path, help="a new directory for the runs, which stay there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.part == "rank":
        return rank()
    if options.part == "agent":
        return run_agent(json.loads(options.recipe))
    found = lose(options.losses, options.seconds, options.seed, options.keep)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(found["equal"] != found["runs"])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as `april.commands.rank` ends
