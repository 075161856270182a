"""Treatment of unfinished samples at a weight update: recomputed, kept, or redrafted.

The quickstart recipe with N' = 1.5 N, trained unchanged except for `on_update`, with a run for each arm and seed.
The runs of a seed take turns of a tenth of a second
(`turns.py`). Reported of each: tokens trained on per processor second (start, training and rollouts, one thread),
staleness, held-out accuracy, and the number of draft tokens and of kept ones. New figures replace the file's figures of
the same seeds, if these have the same number of steps.

    python benchmarks/redraft.py          # about half an hour of one core; --steps 2 --seeds 1 --name try to try it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import save, spread
from turns import take_turns

ARMS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "keep": {"on-update": "keep"},
    "redraft": {"on-update": "redraft"},
}


def measured(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Results of the arms, which take turns."""
    with tempfile.TemporaryDirectory() as directory:
        seconds = take_turns([command(args, arm, seed, Path(directory, arm)) for arm in args.arms])
        return [result(args, arm, seed, Path(directory, arm), seconds[i]) for i, arm in enumerate(args.arms)]


def command(args: argparse.Namespace, arm: str, seed: int, output: Path) -> dict[str, Any]:
    settings = {"on-update": "recompute", "over-sampling-batch-size": 48, "steps": args.steps, "seed": seed}
    settings |= {"threads": 1, "eval-interval": args.steps, **ARMS[arm]}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return {
        "args": [sys.executable, "-m", "april", "train", args.recipe, "--output", str(output), *flags],
        "stdout": subprocess.DEVNULL,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    }


def result(args: argparse.Namespace, arm: str, seed: int, output: Path, seconds: float) -> dict[str, Any]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "step_consumed_tokens" in line]
    assert len(steps) == args.steps

    def total(name: str) -> float:
        return sum(step.get(name, 0) for step in steps)

    drafts = total("redrafted_tokens")
    return {
        "arm": arm,
        "seed": seed,
        "processor_seconds": seconds,
        "consumed_tokens": total("step_consumed_tokens"),
        "tokens_per_processor_second": total("step_consumed_tokens") / seconds,
        "staleness_mean": total("staleness_mean") / len(steps),
        "off_policy_token_share": total("off_policy_token_share") / len(steps),
        "accuracy": [step["accuracy"] for step in steps if step.get("accuracy") is not None],
        "samples_redrafted": total("samples_redrafted"),
        "draft_tokens": drafts,
        "draft_tokens_kept": total("redrafted_tokens_kept"),
        "kept_of_a_draft": total("redrafted_tokens_kept") / max(1, total("samples_redrafted")),
        "kept_share": total("redrafted_tokens_kept") / max(1, drafts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="examples/gcd/recipe.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="compared with the first")
    parser.add_argument("--name", default="", help="of the measurement, if its figures are kept in a file of their own")
    args = parser.parse_args()
    path = Path(__file__).with_name(f"redraft{args.name and '_'}{args.name}.json")
    held = json.loads(path.read_text()) if path.exists() else {}
    found = {(run["seed"], run["arm"]): run for run in held.get("runs", []) if held["steps"] == args.steps}
    for seed in args.seeds:
        for run in measured(args, seed):
            found[seed, run["arm"]] = run
            shown = {name: value for name, value in run.items() if name not in ("consumed_tokens", "draft_tokens")}
            print(json.dumps(shown), flush=True)
        rates = {which: run["tokens_per_processor_second"] for which, run in found.items()}
        first, *others = args.arms
        ratios = {
            f"{arm} to {first}": spread([rates[s, a] / rates[s, first] for s, a in sorted(rates) if a == arm])
            for arm in others
        }
        runs = [found[which] for which in sorted(found)]
        save(__file__, {"steps": args.steps, "tokens_per_processor_second": ratios, "runs": runs}, args.name)
    print(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
