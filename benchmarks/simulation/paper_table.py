"""The paper's table of gains in rollout throughput (arXiv 2509.18521), in simulation.

The paper's setting: 32 prompts x 8 samples, over-sampling 64, responses up to 16,384 tokens, 8 GPUs, colocated; active
partial rollouts at 64 by the policy of its reference (fixed N', no staleness bound, the groups that were complete
first, KV cache recomputed). Costs are the roofline of 8 MI300X. Two gains are given: in tokens of the responses that
are trained on, and in all generated tokens, each over the wall clock of the rollout; they differ if responses are
discarded. The paper's gains are compared with the first.

The paper does not give the lengths of responses, nor the baseline of its DAPO rows. Assumed here:
- lengths: lognormal, truncated at 16,384. Medians of 8,000 to 11,000 and sigma 0.6, so that a quarter is truncated for
  the longest responses, as with such thinking models on competition problems, longer for the harder data. They were
  chosen knowing the GRPO rows; the DAPO rows were not fitted;
- GRPO rows: against synchronous rollouts of 32 prompts;
- DAPO rows: dynamic sampling rejects half of the groups, and the baseline, like the reference's scripts for dynamic
  sampling, also starts 64 prompts, stops at 32 accepted groups, and discards unfinished samples.

The sensitivity table varies median, spread and correlation one at a time around one cell.

    python benchmarks/simulation/paper_table.py
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april import RolloutParams, RolloutScheduler, SamplingParams
from april.rollout.trajectory.group import Group
from april.simulation.engine import SimulatedEngine
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import no_reward, simulate
from april.simulation.virtual_time import run
from april.simulation.workload import Part, Workload

PAPER = {
    ("qwen3-4b", "GRPO"): {"DAPO-Math": 0.24, "DeepScaleR": 0.31, "DeepMath": 0.35},
    ("qwen3-4b", "DAPO"): {"DAPO-Math": 0.08, "DeepScaleR": 0.11, "DeepMath": 0.10},
    ("qwen3-8b", "GRPO"): {"DAPO-Math": 0.26, "DeepScaleR": 0.35, "DeepMath": 0.44},
    ("qwen3-8b", "DAPO"): {"DAPO-Math": 0.08, "DeepScaleR": 0.08, "DeepMath": 0.10},
}
"""Gains in rollout throughput, as the paper reports them."""
LENGTHS = {
    "qwen3-4b": {"DAPO-Math": (11000, 0.6), "DeepScaleR": (9500, 0.6), "DeepMath": (8500, 0.6)},
    "qwen3-8b": {"DAPO-Math": (11000, 0.6), "DeepScaleR": (9000, 0.6), "DeepMath": (8000, 0.6)},
}
"""Median and sigma of the logarithm of response lengths: assumed."""
TURNED_AWAY = 0.5
"""Share of the groups that dynamic sampling turns away: assumed."""
ENGINES = 8
RESOLUTION = 0.5
"""Seconds by which the scheduler may learn of an event late; a step takes a hundred or more."""


def workload(median: float, sigma: float, correlation: float = 0.6) -> Workload:
    return Workload("paper", (Part(median, sigma),), correlation=correlation, prompt_tokens=150)


def keep(group: Group) -> bool:
    """Dynamic sampling that turns away the same groups in both arms."""
    return (group.id * 0x9E3779B97F4A7C15) % 2**64 / 2**64 >= TURNED_AWAY


async def throwing_away(engine: SimulatedEngine, lengths: Workload, steps: int, seed: int) -> tuple[float, float]:
    """Generated and consumed tokens/s of over-sampled rollouts whose unfinished groups are dropped after each step."""
    prompts = lengths.prompts()
    loop = asyncio.get_running_loop()
    generated = consumed = 0
    began = loop.time()
    for number in range(steps):
        scheduler = RolloutScheduler(
            engine,
            prompts,
            no_reward,
            RolloutParams(
                rollout_batch_size=lengths.rollout_batch_size,
                over_sampling_batch_size=64,
                n_samples_per_prompt=lengths.n_samples_per_prompt,
                max_staleness=None,
            ),
            sampling=SamplingParams(max_tokens=lengths.max_tokens),
            reward_scope="group",
            dynamic_filter=keep,
            seed=1_000_000 * (seed + 1) + number,
        )
        async with scheduler:
            step = await scheduler.next_batch()
        engine.forget()
        await engine.update_weights(0)
        generated += step.sampled_tokens
        consumed += step.consumed_tokens
    seconds = loop.time() - began
    return generated / seconds, consumed / seconds


def gains(model: str, lengths: Workload, steps: int, seeds: int, dapo: bool = False) -> dict[str, float]:
    """Gain of the paper's policy over its baseline, mean over seeds, with related figures."""
    cost = roofline(GPUS["mi300x"], MODELS[model], Roofline(slots=256), trainer_gpus=ENGINES)
    consumed = generated = staleness = off_policy = 0.0
    for seed in range(seeds):
        common: dict[str, Any] = {"replicas": ENGINES, "steps": steps, "warm_up": steps // 4, "seed": seed}
        common["resolution"] = RESOLUTION
        if dapo:
            common["dynamic_filter"] = keep
            engine = SimulatedEngine(cost, lengths, ENGINES, resolution=RESOLUTION)
            base_generated, base_consumed = run(throwing_away(engine, lengths, steps, seed))
        else:
            synchronous = simulate(lengths, cost, partial_rollout=False, **common)
            base_generated = synchronous.generated_tokens_per_second
            base_consumed = synchronous.consumed_tokens_per_second
        partial = simulate(lengths, cost, over_sampling_batch_size=64, max_staleness=None, first_come=True, **common)
        consumed += partial.consumed_tokens_per_second / base_consumed - 1
        generated += partial.generated_tokens_per_second / base_generated - 1
        staleness += partial.mean_staleness
        off_policy += partial.off_policy_token_share
    return {
        "generated_gain": generated / seeds,
        "consumed_gain": consumed / seeds,
        "mean_staleness": staleness / seeds,
        "off_policy_token_share": off_policy / seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    table: dict[str, Any] = {}
    for (model, algorithm), cells in PAPER.items():
        for data, reported in cells.items():
            found = gains(model, workload(*LENGTHS[model][data]), args.steps, args.seeds, dapo=algorithm == "DAPO")
            table[f"{model}, {algorithm}, {data}"] = {"paper": reported, **found}
            print(
                f"{model} {algorithm} {data}: paper {reported:+.0%}, simulated {found['consumed_gain']:+.0%} "
                f"trained on, {found['generated_gain']:+.0%} generated, staleness {found['mean_staleness']:.2f}",
                flush=True,
            )
    sensitivity = {}
    for name, lengths in {
        "as assumed: median 9000, sigma 0.6, correlation 0.6": workload(9000, 0.6),
        "median 3000": workload(3000, 0.6),
        "median 6000": workload(6000, 0.6),
        "median 13000": workload(13000, 0.6),
        "sigma 0.3": workload(9000, 0.3),
        "sigma 1.0": workload(9000, 1.0),
        "correlation 0.2": workload(9000, 0.6, 0.2),
        "correlation 0.9": workload(9000, 0.6, 0.9),
    }.items():
        sensitivity[name] = gains("qwen3-8b", lengths, args.steps, args.seeds)
        print(f"{name}: {sensitivity[name]['consumed_gain']:+.0%} trained on", flush=True)
    results = {
        "assumed": {"lengths": LENGTHS, "turned_away_by_dynamic_sampling": TURNED_AWAY, "engines": ENGINES},
        "cost_models": {
            model: dataclasses.asdict(
                roofline(GPUS["mi300x"], MODELS[model], Roofline(slots=256), trainer_gpus=ENGINES)
            )
            for model in LENGTHS
        },
        "cells": table,
        "sensitivity": sensitivity,
    }
    print(save(__file__, results))


if __name__ == "__main__":
    main()
