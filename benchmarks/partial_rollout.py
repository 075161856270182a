"""Partial against synchronous rollouts at the same N, the same samples per prompt and the same engine slots.

The rollout phase of the quickstart recipe, with its policy, its problems and its lengths; nothing is trained, so that
every arm generates from the same distribution, but the weights are sent after every step as if they had changed.
All arms run in one process in turn, a block of steps each, round after round. Reported: consumed tokens/s of each arm,
its ratio to the synchronous arm of the same round, the share of the time that the scheduler's own code takes, and the
share of everything but forward passes and scoring (the scheduler, the engine's bookkeeping, tokenizing, asyncio).

`--automatic` compares automatic N' with a fixed one by processor time, planning included, for a shared machine.

    OMP_NUM_THREADS=2 python benchmarks/partial_rollout.py
    OMP_NUM_THREADS=1 python benchmarks/partial_rollout.py --automatic --slots 128 --ratios 1.5
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import save, spread

from april import RolloutScheduler
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.policy import load_policy, stop_tokens
from april.training.task_reward import TaskRewards

SHARES = {"scheduler_share_of_time": "scheduler", "share_without_passes_and_scoring": "everything_else"}


class Arm:
    """One way of collecting, with an engine of its own and the time it has taken."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        over_sampling: int | str | None,
        on_update: str,
        slots: int,
        policy: Any,
        task: Any,
    ) -> None:
        model, tokenizer = policy
        rollout = recipe.rollout
        self.name = name
        self.engine = EmbeddedEngine(
            model,
            max_num_seqs=slots,
            context_length=recipe.engine.context_length,
            on_update=on_update,
            stream_interval=recipe.engine.stream_interval,
        )
        self.rewards = TaskRewards(task.scorer, tokenizer, rollout)
        self.scheduler = RolloutScheduler(
            self.engine,
            iter(self._timed("elsewhere", PromptStream(task, Encoder(tokenizer), seed=1).__next__), None),
            self.score,
            replace(
                recipe.rollout_params(partial_rollout=over_sampling is not None),
                over_sampling_batch_size=over_sampling or rollout.rollout_batch_size,
            ),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
        )
        self.passes = self.scoring = self.elsewhere = 0.0
        self.busy = False
        self.targets: list[int] = []
        self.staleness: list[float] = []
        self.off_policy: list[float] = []
        self.occupancy: list[float] = []
        engine: Any = self.engine
        engine._step = self._timed("passes", engine._step)
        engine.submit = self._timed("elsewhere", engine.submit)
        engine.poll = self._timed_async(engine.poll)
        engine.interrupt = self._timed_async(engine.interrupt)
        engine.update_weights = self._timed_async(engine.update_weights)

    def _timed(self, total: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self, total, getattr(self, total) + time.perf_counter() - began)

        return timed

    def _timed_async(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*args)
            finally:
                self.elsewhere += time.perf_counter() - began

        return timed

    async def score(self, prompt: Any, sample: Any) -> float:
        began = time.perf_counter()
        reward = await self.rewards(prompt, sample)
        self.scoring += time.perf_counter() - began
        return reward

    async def block(self, steps: int) -> dict[str, float]:
        """Consumed and generated tokens per second of `steps` steps, and the scheduler's share of the time."""
        self.passes = self.scoring = self.elsewhere = waited = 0.0
        consumed = generated = 0
        seconds = 0.0
        clock = time.process_time if self.busy else time.perf_counter
        for _ in range(steps):
            began = clock()
            step = await self.scheduler.next_batch()
            await self.scheduler.update_weights()
            seconds += clock() - began
            self.targets.append(step.target)
            consumed += step.consumed_tokens
            generated += step.sampled_tokens
            waited += step.reward_wait_seconds
            self.staleness.append(float(step.staleness.mean()))
            self.off_policy.append(step.off_policy_token_share)
            self.occupancy.append(step.occupancy)
        rates = {"consumed": consumed / seconds, "generated": generated / seconds}
        if self.busy:  # shares are of the clock on the wall
            return rates
        return rates | {
            "scheduler": 1 - (self.elsewhere + waited) / seconds,
            "everything_else": 1 - (self.passes + self.scoring) / seconds,
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    recipe = load_recipe(Path(args.recipe))
    policy = load_policy(recipe.model)
    task = build_task(recipe.task)
    batch_size = recipe.rollout.rollout_batch_size
    results = {}
    for slots in args.slots:
        arms = [Arm(recipe, "synchronous", None, "keep", slots, policy, task)]
        for ratio in args.ratios:
            for on_update in ("keep",) if args.automatic else ("keep", "recompute"):
                name = f"partial, N'/N = {ratio:g}, {on_update}"
                arms.append(Arm(recipe, name, round(ratio * batch_size), on_update, slots, policy, task))
        if args.automatic:
            arms.append(Arm(recipe, "partial, automatic, keep", "auto", "keep", slots, policy, task))
            for arm in arms:
                arm.busy = True
        rounds: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
        for arm in arms:  # first steps differ: buffers are empty, caches and kernels cold
            await arm.block(args.warm_up)
        for _ in range(args.rounds):
            for arm in arms:
                rounds[arm.name].append(await arm.block(args.steps))
            print({arm.name: round(rounds[arm.name][-1]["consumed"]) for arm in arms}, flush=True)
        base = rounds["synchronous"]
        results[f"{slots} slots"] = {
            arm.name: {
                "consumed_tokens_per_second": spread([r["consumed"] for r in rounds[arm.name]]),
                "generated_tokens_per_second": spread([r["generated"] for r in rounds[arm.name]]),
                "consumed_ratio_to_synchronous": spread(
                    [r["consumed"] / b["consumed"] for r, b in zip(rounds[arm.name], base, strict=True)]
                ),
                "targets": arm.targets,
                **{
                    name: spread([r[share] for r in rounds[arm.name]])
                    for name, share in SHARES.items()
                    if not args.automatic
                },
                "mean_staleness": sum(arm.staleness) / len(arm.staleness),
                "off_policy_token_share": sum(arm.off_policy) / len(arm.off_policy),
                "occupancy": sum(arm.occupancy) / len(arm.occupancy),
            }
            for arm in arms
        }
        for name, result in results[f"{slots} slots"].items():
            ratio, rate = result["consumed_ratio_to_synchronous"], result["consumed_tokens_per_second"]["median"]
            shares = [f"{share.replace('_', ' ')} {result[share]['median']:.2%}" for share in SHARES if share in result]
            print(
                f"{slots} slots, {name}: {rate:,.0f} consumed tokens/s, {ratio['median']:.2f} x ({ratio['min']:.2f} to "
                f"{ratio['max']:.2f}), occupancy {result['occupancy']:.0%}, staleness {result['mean_staleness']:.2f}",
                *shares,
                sep=", ",
                flush=True,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="examples/gcd/recipe.toml")
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 256], help="engine slots to measure at")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.25, 1.5, 2.0], help="N'/N of the partial arms")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of an arm in a round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each arm before the first round")
    parser.add_argument("--automatic", action="store_true", help="automatic N' too, and all by processor time")
    args = parser.parse_args()
    found = {"results": asyncio.run(measure(args)), "settings": vars(args)}
    print(save(__file__, found, "automatic" if args.automatic else ""))


if __name__ == "__main__":
    main()
