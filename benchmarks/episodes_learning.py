"""Results of reinforcement learning with the policies of `examples/bisect`, `guess` and `gcd_tool`, seed by seed.

Each run is `april train` on the example's recipe; the arm `synchronous` has synchronous rollouts on the same slots.
Kept of each run: held-out success at every evaluation with the processor seconds until then, wall-clock and processor
seconds of the whole run, staleness, interrupted turns, and tokens that no sample contains.

    OMP_NUM_THREADS=1 python benchmarks/episodes_learning.py guess
    OMP_NUM_THREADS=1 python benchmarks/episodes_learning.py gcd_tool --arms synchronous partial --seeds 5
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
from record import save

from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.reporting.metrics_log import read_metrics
from april.training.build import train

EXAMPLES = Path(__file__).parents[1] / "examples"


def recipe_of(args: argparse.Namespace, arm: str, seed: int, output: str) -> Recipe:
    recipe = load_recipe(EXAMPLES / args.example / "recipe.toml")
    steps = args.steps or recipe.training.steps
    rollout = recipe.rollout
    if arm == "synchronous":
        rollout = replace(rollout, partial_rollout=False, over_sampling_batch_size=rollout.rollout_batch_size)
    training = replace(recipe.training, seed=seed, steps=steps, save_interval=0, threads=1, journal_flush_seconds=0.5)
    return replace(
        recipe, rollout=rollout, training=training, reporting=replace(recipe.reporting, output=output, trackers=())
    )


def run(args: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        recipe = recipe_of(args, arm, seed, f"{directory}/run")
        wall, cpu = time.perf_counter(), time.process_time()
        summary = asyncio.run(train(recipe, clock=time.process_time))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert summary is not None
        metrics = list(read_metrics(Path(recipe.reporting.output)))
        interrupted = interrupted_turns(Path(recipe.reporting.output))
    return {
        "arm": arm,
        "seed": seed,
        "held_out": curve(metrics),
        "wall_seconds": wall,
        "processor_seconds": cpu,
        "consumed_tokens": summary["consumed_tokens"],
        "staleness_mean": summary["staleness_mean"],
        "staleness_max": summary["staleness_max"],
        "max_staleness": recipe.rollout.max_staleness,
        "discarded_tokens": summary["discarded_tokens"],
        "interrupted_turns": interrupted,
        "samples_resumed": sum(record.get("samples_resumed", 0) for record in metrics),
        "turns_mean": [record["turns_mean"] for record in metrics if "turns_mean" in record],
        "rewards": [record["reward"] for record in metrics if "reward" in record],
    }


def interrupted_turns(run: Path) -> float:
    """Share of the turns trained on whose tokens are of several versions of the policy."""
    turns, interrupted = 0, 0
    for file in (run / "completions").glob("*.parquet"):
        for row in pyarrow.parquet.read_table(file, columns=["held_out", "pieces"]).to_pylist():
            if not row["held_out"]:
                drawn = [piece["version"] >= 0 for piece in row["pieces"]]
                lengths = [len(list(pieces)) for own, pieces in itertools.groupby(drawn) if own]
                turns += len(lengths)
                interrupted += sum(length > 1 for length in lengths)
    return interrupted / max(turns, 1)


def curve(metrics: Sequence[Any]) -> list[dict[str, float]]:
    """The evaluations, with the seconds of the processor since the run began."""
    return [
        {"step": m["step"], "seconds": m["seconds"], "reward": m["eval_reward"], "success": m["accuracy"]}
        for m in metrics
        if "accuracy" in m
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=("bisect", "guess", "gcd_tool"))
    parser.add_argument("--arms", nargs="+", choices=("synchronous", "partial"), default=["partial"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="keep other runs of the same file")
    parser.add_argument("--steps", type=int, help="of each run; the recipe's own if not given")
    args = parser.parse_args()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for arm in args.arms:
            found = run(args, arm, seed)
            first, last = found["held_out"][0], found["held_out"][-1]
            print(
                f"{args.example}, seed {seed}, {arm}: {first['success']:.3f} to {last['success']:.3f} in "
                f"{found['wall_seconds']:.0f} s ({found['processor_seconds']:.0f} s of the processor)",
                flush=True,
            )
            keep(args, found)


def keep(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Add a run to the file, which keeps earlier runs of this process, and with `--add` of other processes."""
    path = Path(__file__).with_name(f"{Path(__file__).stem}_{args.example}.json")
    runs = json.loads(path.read_text())["runs"] if args.add and path.exists() else []
    args.add = True
    runs = [one for one in runs if (one["arm"], one["seed"]) != (found["arm"], found["seed"])] + [found]
    runs.sort(key=lambda one: (one["seed"], one["arm"]))
    final = {}
    for arm in sorted({one["arm"] for one in runs}):
        ends = [one["held_out"][-1]["success"] for one in runs if one["arm"] == arm]
        final[arm] = {"median": statistics.median(ends), "mean": statistics.fmean(ends), "each": ends}
    save(__file__, {"final": final, "runs": runs}, args.example)


if __name__ == "__main__":
    main()
