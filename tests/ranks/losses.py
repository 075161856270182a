"""Lose ranks at random moments, by SIGKILL and SIGSTOP, and compare each run's end with one that nobody disturbed.

    python -m tests.ranks.losses --losses 50 --json benchmarks/rank_losses.json

A run of 12 steps on two ranks is disturbed until it ends, then the next one begins, until so many ranks were lost.
Compared are the groups of every step with all their tokens, the versions of these and the rewards, exactly, as often as
a step was trained on, and the metrics that do not depend on the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from april.training import agent
from tests.ranks.launch import ROOT
from tests.ranks.runs import rank_of, recipe_in, trained

LEDGER = "APRIL_LEDGER"
STEPS = 12
SILENCE = 12.0
"""Seconds without a sign of life after which a rank has hung."""
BETWEEN = 12.0
"""Seconds between two losses at most."""


def rank() -> int:
    """One of the ranks; the first one notes what each step is trained on, in a file for each time."""
    from april.commands.rank import main as rank_main
    from april.rollout.step import Step
    from april.training.leader import Leader

    train, ledger = Leader.train, Path(os.environ[LEDGER])

    def noted(self: Leader, step: Step, number: int) -> dict[str, float]:
        content = [
            [group.id, [[s.index, s.response_ids, s.versions.tolist(), s.reward, str(s.finish)] for s in group.samples]]
            for group in step.groups
        ]
        names = (ledger / f"{number}-{life}.json" for life in itertools.count())
        next(name for name in names if not name.exists()).write_text(json.dumps(content))
        return train(self, step, number)

    Leader.train = noted  # type: ignore[method-assign]
    return rank_main()


def run_agent(recipe: dict[str, Any]) -> int:
    agent.COMMAND = [sys.executable, "-m", "tests.ranks.losses", "--part", "rank"]
    agent.GRACE_SECONDS = 4.0
    return agent.Agent(recipe_from_dict(recipe)).run()


def recipe_of(base: Path, name: str) -> Recipe:
    """A run's, which ranks may be lost in as often as one likes."""
    recipe = load_recipe(recipe_in(base, name))
    recipe.training.steps, recipe.training.save_interval = STEPS, 3
    recipe.trainer.rank_timeout, recipe.trainer.max_restarts = SILENCE, 1000
    return recipe


def start(base: Path, name: str, recipe: Recipe) -> subprocess.Popen[str]:
    """A run with its agent."""
    (base / f"{name}-ledger").mkdir()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, LEDGER: str(base / f"{name}-ledger")}
    command = [sys.executable, "-m", "tests.ranks.losses", "--part", "agent", json.dumps(recipe.to_dict())]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": (base / f"{name}.log").open("w")}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def outcome(base: Path, name: str) -> dict[str, Any]:
    """What a finished run was trained on, and its metrics."""
    steps: dict[str, Any] = {}
    for path in sorted((base / f"{name}-ledger").iterdir()):
        number, content = path.name.partition("-")[0], json.loads(path.read_text())
        assert steps.setdefault(number, content) == content, f"{name}: step {number} was not the same again"
    return {"steps": steps, "metrics": trained(base / name)}


def disturb(process: subprocess.Popen[str], most: int, deadline: float) -> dict[str, int]:
    """Lose at most so many ranks of a run until it ends; how many by which signal."""
    lost = {"SIGKILL": 0, "SIGSTOP": 0}
    while sum(lost.values()) < most and time.monotonic() < deadline:
        try:
            process.wait(random.uniform(0, BETWEEN))
            break
        except subprocess.TimeoutExpired:
            pass
        chosen = random.choice((signal.SIGKILL, signal.SIGSTOP))
        try:
            os.kill(rank_of(process, random.randrange(2)), chosen)
        except (AssertionError, ProcessLookupError):
            continue  # between two lives
        lost[chosen.name] += 1
    return lost


def lose(losses: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Lose so many ranks, or as many as there is time for."""
    random.seed(seed)
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {"SIGKILL": 0, "SIGSTOP": 0, "restarts": 0, "runs": 0, "equal": 0, "differing": []}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        calm = start(base, "calm", recipe_of(base, "calm"))
        assert calm.wait(1200) == 0, (base / "calm.log").read_text()
        expected = outcome(base, "calm")
        assert len(expected["steps"]) == STEPS
        while (left := losses - found["SIGKILL"] - found["SIGSTOP"]) > 0 and time.monotonic() < deadline:
            name = f"run-{found['runs']}"
            process = start(base, name, recipe_of(base, name))
            for kind, count in disturb(process, left, deadline).items():
                found[kind] += count
            status, said = process.wait(1200), (base / f"{name}.log").read_text()
            assert status == 0, said
            found["runs"] += 1
            found["restarts"] += said.count("start anew")
            same = outcome(base, name) == expected
            found["equal"] += same
            found["differing"] += [] if same else [name]
            print(found, file=sys.stderr, flush=True)
    return {"steps": STEPS, "losses": found["SIGKILL"] + found["SIGSTOP"], **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "agent", "rank"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("recipe", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin nothing after that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.part == "rank":
        return rank()
    if options.part == "agent":
        return run_agent(json.loads(options.recipe))
    found = lose(options.losses, options.seconds)
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
