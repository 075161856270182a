"""Partial against synchronous rollouts of episodes, at the same N and slots, where the environment takes its time.

The rollout phase of `examples/gcd_tool`: its policy, its problems, its turns. Nothing is trained, so that every arm
samples from one distribution; the weights are sent after every step as if they had changed. An answer of the tool takes
no time, 20 ms, or 20 ms on average with a heavy tail. The arms of a latency run in one process in turn, a block of
steps each, round after round, in wall-clock time, since waiting is measured. Reported for each
arm: consumed tokens/s, its ratio to the synchronous arm of the same round, the staleness against its bound, sampled
tokens that no sample holds, and the turns of the episodes.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save, spread

from april import RolloutScheduler
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.images.store import NoImages
from april.rollout.episodes.episodes import Episodes
from april.simulation.run import no_reward
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.build import build_environment
from april.training.environment_setup import EnvironmentSetup
from april.training.policy import load_policy, stop_tokens

EXAMPLE = Path(__file__).parents[1] / "examples" / "gcd_tool"
LATENCIES: dict[str, dict[str, Any]] = {
    "0": {"latency": 0.0},
    "20 ms": {"latency": 0.02},
    "20 ms, heavy-tailed": {"latency": 0.02, "tail": "heavy"},
}


class Arm:
    """One way of collecting, with an engine of its own."""

    def __init__(
        self, name: str, recipe: Recipe, world: EnvironmentSetup, episodes: Episodes, policy: Any, task: Any
    ) -> None:
        model, tokenizer = policy
        self.name, self.bound = name, recipe.rollout.max_staleness
        engine = EmbeddedEngine(
            model,
            max_num_seqs=recipe.engine.max_num_seqs,
            context_length=recipe.engine.context_length,
            on_update="keep",
        )
        prompts = PromptStream(task, Encoder(tokenizer, world.chat_template, world.template_arguments), 1)
        self.scheduler = RolloutScheduler(
            engine,
            prompts,
            no_reward,
            recipe.rollout_params(),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
            reward_scope="group",
            seed=1,
            episodes=episodes,
        )
        self.steps: list[dict[str, float]] = []
        self.turns: list[int] = []

    async def block(self, steps: int) -> tuple[float, float]:
        """Consumed tokens per second of `steps` steps, by the clock on the wall and of the processor."""
        consumed = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step = await self.scheduler.next_batch()
            await self.scheduler.update_weights()
            consumed += step.consumed_tokens
            self.steps.append(step.metrics())
            self.turns += [sample.turns for group in step.groups for sample in group.samples]
        return consumed / (time.perf_counter() - wall), consumed / (time.process_time() - cpu)

    def forget(self) -> None:
        self.steps.clear()
        self.turns.clear()

    def found(self, rates: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]]) -> dict[str, Any]:
        def mean(name: str) -> float:
            return sum(step[name] for step in self.steps) / len(self.steps)

        buffer = self.scheduler.buffer
        buffer.check()
        by_wall, by_cpu = ([rate[clock] / of[clock] for rate, of in zip(rates, base, strict=True)] for clock in (0, 1))
        return {
            "consumed_tokens_per_second": spread([rate[0] for rate in rates]),
            "consumed_ratio_to_synchronous": spread(by_wall),
            "consumed_ratio_by_processor_time": spread(by_cpu),
            "occupancy": mean("engine_occupancy"),
            "staleness_mean": mean("staleness_mean"),
            "staleness_max": max(step["staleness_max"] for step in self.steps),
            "max_staleness": self.bound,
            "discarded_tokens": buffer.discarded_tokens,
            "turns": {f"p{p}": float(np.percentile(self.turns, p)) for p in (50, 90, 99, 100)},
            "episodes": len(self.turns),
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    recipe = load_recipe(EXAMPLE / "recipe.toml")
    policy = load_policy(replace(recipe.model, path=str(args.policy)) if args.policy else recipe.model)
    task = build_task(recipe.task)
    results = {}
    for latency, params in LATENCIES.items():
        slow = f"{EXAMPLE / 'env.py'}:SlowSubtraction"
        environment = replace(recipe.environment, tools="", path=slow, params=params, concurrency=1024)
        engine = replace(recipe.engine, max_num_seqs=args.groups * args.samples)
        rollout = replace(recipe.rollout, n_samples_per_prompt=args.samples)
        own = replace(recipe, environment=environment, engine=engine, rollout=rollout)
        async with AsyncExitStack() as stack:
            arms = []
            for ratio in (1.0, *args.ratios):
                arm = stack.enter_context(arm_of(own, args.groups, ratio, policy, task))
                arms.append(arm)
                await stack.enter_async_context(arm.scheduler)
            results[latency] = await compared(latency, arms, args)
            save(__file__, {"results": results, "settings": {**vars(args), "policy": str(args.policy or "model")}})
    return results


@contextmanager
def arm_of(recipe: Recipe, size: int, ratio: float, policy: Any, task: Any) -> Iterator[Arm]:
    under_way = {"rollout_batch_size": size, "over_sampling_batch_size": round(ratio * size)}
    own = replace(recipe, rollout=replace(recipe.rollout, partial_rollout=ratio > 1, **under_way))
    world = build_environment(own, policy[1], stop_tokens(*policy), NoImages("episodes here have text"))
    assert world is not None
    with world.episodes(recipe.engine.context_length or 0, Path(recipe.reporting.output)) as episodes:
        yield Arm(f"N' = {ratio:g} N" if ratio > 1 else "synchronous", own, world, episodes, policy, task)


async def compared(latency: str, arms: Sequence[Arm], args: argparse.Namespace) -> dict[str, Any]:
    rates: list[list[tuple[float, float]]] = [[] for _ in arms]
    for arm in arms[1:]:  # buffers are empty at first
        await arm.block(args.warm_up)
        arm.forget()
    for _ in range(args.rounds):
        for arm, rate in zip(arms, rates, strict=True):
            rate.append(await arm.block(args.steps))
        print(latency, [round(rate[-1][0]) for rate in rates], flush=True)
    results = {arm.name: arm.found(rate, rates[0]) for arm, rate in zip(arms, rates, strict=True)}
    for name, found in results.items():
        ratio = found["consumed_ratio_to_synchronous"]
        print(
            f"{latency}, {name}: {found['consumed_tokens_per_second']['median']:,.0f} consumed tokens/s, "
            f"{ratio['median']:.2f} x ({ratio['min']:.2f} to {ratio['max']:.2f}), occupancy {found['occupancy']:.0%}, "
            f"staleness {found['staleness_mean']:.2f}, at most {found['staleness_max']}, turns {found['turns']}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="instead of the example's warm start, a checkpoint of it")
    parser.add_argument("--groups", type=int, default=8, help="N, groups that a step trains on")
    parser.add_argument("--samples", type=int, default=4, help="of a group; every arm has a slot for each of a step")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 3.0], help="N'/N of the partial arms")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of an arm in a round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each partial arm before the first round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
