"""What GSPO's clip takes out of partial rollouts, by clip range and correction.

Twelve steps on factors at N' = 2 N (factors.toml), at the best learning rate of the second study; an arm for each range
and correction, the arms of one seed in turn.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/gspo_clipping.py
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

HERE = Path(__file__).parent
PUBLISHED = ("--algorithm", "gspo")
WIDE = (*PUBLISHED, "--eps-low", "0.03", "--eps-high", "0.04")
ARMS = {
    "synchronous, published range": (*PUBLISHED, "--no-partial-rollout"),
    "published range": PUBLISHED,
    "0.03 and 0.04": WIDE,
    "published range, geometric": (*PUBLISHED, "--correction", "geometric"),
    "published range, decoupled": (*PUBLISHED, "--correction", "decoupled"),
}
RATE = 1.7e-4
SEEDS = (500, 501, 502)


def measure(flags: tuple[str, ...], seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        own = ["--learning-rate", str(RATE), "--seed", str(seed), "--output", f"{folder}/run", "--eval-interval", "0"]
        command = [sys.executable, "-m", "april", "train", str(HERE / "factors.toml"), *flags, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in metrics if "clip_fraction" in record]
    return {
        "clipped": [round(record["clip_fraction"], 4) for record in steps],
        "off_policy": [round(record["off_policy_token_share"], 4) for record in steps],
        "accuracy": [record["accuracy"] for record in metrics if record.get("accuracy") is not None][-1],
    }


def main() -> None:
    runs: list[dict[str, Any]] = []
    for seed, (arm, flags) in itertools.product(SEEDS, ARMS.items()):
        runs.append({"arm": arm, "learning_rate": RATE, "seed": seed, **measure(flags, seed)})
        print(runs[-1], flush=True)
        save(__file__, {"arms": {arm: summary(runs, arm) for arm in ARMS}, "runs": runs})


def summary(runs: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Clipped tokens in steps with tokens of an older policy, or in all steps if there are none; accuracy next to the
    synchronous arm's, seed by seed."""
    own = {run["seed"]: run for run in runs if run["arm"] == arm}
    base = {run["seed"]: run for run in runs if run["arm"] == next(iter(ARMS))}
    pairs = [pair for run in own.values() for pair in zip(run["clipped"], run["off_policy"], strict=True)]
    stale = [clipped for clipped, share in pairs if share > 0] or [clipped for clipped, _ in pairs]
    return {
        "clipped": round(statistics.fmean(stale), 4) if stale else None,
        "most_clipped_in_a_step": max(stale, default=None),
        "accuracy": [run["accuracy"] for run in own.values()],
        "minus_synchronous": [round(run["accuracy"] - base[seed]["accuracy"], 4) for seed, run in own.items()],
    }


if __name__ == "__main__":
    main()
