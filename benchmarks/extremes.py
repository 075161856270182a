"""Responses of 2 and of 1,000 tokens on the embedded engine: responses of 100 and 50,000 tokens at a fiftieth.

The real counterpart of `extremes` in benchmarks/simulation/paper_checks.py: nine short responses for each long one, and
groups that tend to be all short or all long; lengths are the workload's, the engine ends each response there. 8 groups
of 8 a step on 64 slots, the policy of the quickstart (the text has no meaning here), caches kept, bound 5.
Each arm plays the same prompts with the same lengths, one after the other, seed by seed; seconds are processor time.

    OMP_NUM_THREADS=1 python benchmarks/extremes.py       # about a quarter of an hour of one core
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch
from record import save, spread

from april.config.reading import load_recipe
from april.engines.embedded import EmbeddedEngine
from april.simulation.measurement import serve
from april.simulation.run import Outcome
from april.simulation.workload import Part, Workload
from april.training.policy import load_policy

sys.path.insert(0, str(Path(__file__).parent / "simulation"))
from paper_checks import RATIOS

SHORT, LONG = 2, 1000
WORK = Workload(
    "extremes",
    (Part(SHORT, 0.1, 0.9), Part(LONG, 0.1, 0.1)),
    max_tokens=1400,
    correlation=0.6,
    prompt_tokens=8,
    rollout_batch_size=8,
    n_samples_per_prompt=8,
)


async def play(model: Any, ratio: float, steps: int, seed: int) -> Outcome:
    engine = EmbeddedEngine(model, max_num_seqs=64, context_length=1500, on_update="keep", stream_interval=16)
    batch = WORK.rollout_batch_size
    how = {"partial_rollout": False} if ratio == 1 else {"over_sampling_batch_size": round(ratio * batch)}
    return await serve(
        engine,
        WORK,
        engine.update_weights,
        steps=steps,
        vocabulary=model.config.vocab_size,
        warm_up=steps // 4,
        clock=time.process_time,
        seed=seed,
        max_staleness=5,
        **how,
    )


def summary(outcomes: list[Outcome], synchronous: list[Outcome]) -> dict[str, Any]:
    counted = [length for outcome in outcomes for length in outcome.lengths]
    first = [length for outcome in outcomes for length in outcome.steps[0].lengths]
    rates = [outcome.consumed_tokens_per_second for outcome in outcomes]
    return {
        "consumed_tokens_per_second": spread(rates),
        "ratio_to_synchronous": spread(
            [rate / base.consumed_tokens_per_second for rate, base in zip(rates, synchronous, strict=True)]
        ),
        "mean_staleness": spread([outcome.mean_staleness for outcome in outcomes]),
        "max_staleness": max(outcome.max_staleness for outcome in outcomes),
        "occupancy": spread([outcome.occupancy for outcome in outcomes]),
        "long_share": share_of_long(counted),
        "long_share_of_the_first_step": share_of_long(first),
    }


def share_of_long(lengths: list[int]) -> float:
    return sum(int(length) > LONG // 10 for length in lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(Path("examples/gcd/recipe.toml"))
    model, _ = load_policy(recipe.model)
    model.config.max_position_embeddings = 1500
    outcomes: dict[float, list[Outcome]] = {ratio: [] for ratio in RATIOS}
    for seed in range(args.seeds):
        for ratio in RATIOS:
            outcome = asyncio.run(play(model, ratio, args.steps, seed))
            outcomes[ratio].append(outcome)
            print(seed, ratio, f"{outcome.consumed_tokens_per_second:,.0f} tokens/s", flush=True)
    save(__file__, {f"{ratio:g}": summary(outcomes[ratio], outcomes[1]) for ratio in RATIOS})


if __name__ == "__main__":
    main()
