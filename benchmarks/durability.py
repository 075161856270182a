"""Cost of the journal: the rollouts of the quickstart recipe with and without it.

Two arms in one process, each with its own engine and scheduler, the same seeds and therefore the same tokens; nothing
is trained, but the weights are sent after each step as if they had changed. A block of steps of one arm, the same steps
of the other arm, then in reverse order. Reported: consumed tokens/s of each arm, the ratio of each pair of blocks, and,
because a ratio of two measurements is noisier than the effect, the journal's own time: the time for which it blocks the
event loop, and the processor time of its writer.

Tokens per second of processor time are reported too: they are less informative, but other load hardly changes them.

    OMP_NUM_THREADS=2 python benchmarks/durability.py
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import save, spread

from april import RolloutScheduler
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import segments_of
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.policy import load_policy, stop_tokens
from april.training.task_reward import TaskRewards


class TimedJournal(Journal):
    """Adds up the journal's time on the event loop and on the processor."""

    held_up = 0.0
    writing = 0.0

    def record(self, *events: Any) -> None:
        self.held_up += _seconds(lambda: super(TimedJournal, self).record(*events))

    def flush(self) -> None:
        self.held_up += _seconds(super().flush)

    def commit(self, records: Any) -> None:
        super().commit(records)
        self.writing = time.thread_time()  # of the writer's thread, since it began


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Arm:
    """One way of collecting, with what each of its blocks brought."""

    def __init__(self, recipe: Recipe, policy: Any, task: Any, journal: TimedJournal | None) -> None:
        model, tokenizer = policy
        rollout, engine = recipe.rollout, recipe.engine
        self.journal = journal
        self.rates: list[float] = []
        self.processor_rates: list[float] = []
        self.seconds = 0.0
        self.scheduler = RolloutScheduler(
            EmbeddedEngine(
                model,
                max_num_seqs=engine.max_num_seqs,
                context_length=engine.context_length,
                on_update=engine.on_update,
                stream_interval=engine.stream_interval,
            ),
            PromptStream(task, Encoder(tokenizer), seed=1),
            TaskRewards(task.scorer, tokenizer, rollout),
            replace(recipe.rollout_params(), over_sampling_batch_size=48),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
            journal=journal,
        )

    async def block(self, steps: int) -> None:
        consumed, seconds, processor = 0, 0.0, time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            step = await self.scheduler.next_batch()
            await self.scheduler.update_weights()
            seconds += time.perf_counter() - began
            consumed += step.consumed_tokens
        self.rates.append(consumed / seconds)
        self.processor_rates.append(consumed / (time.process_time() - processor))
        self.seconds += seconds


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    recipe = load_recipe(Path(args.recipe))
    policy, task = load_policy(recipe.model), build_task(recipe.task)
    journal = TimedJournal(directory / "journal", args.delay)
    without, durable = Arm(recipe, policy, task, None), Arm(recipe, policy, task, journal)
    for arm in (without, durable):  # first steps differ: buffers are empty, caches and kernels cold
        await arm.block(args.warm_up)
        arm.rates.clear()
        arm.processor_rates.clear()
        arm.seconds = 0.0
    journal.flush()
    before = journal.held_up, journal.writing
    for pair in range(args.pairs):
        for arm in (without, durable) if pair % 2 else (durable, without):
            await arm.block(args.steps)
    journal.flush()
    held_up, writing = journal.held_up - before[0], journal.writing - before[1]
    tokens = durable.scheduler.buffer.sampled_tokens
    assert tokens == without.scheduler.buffer.sampled_tokens, "the arms did different work"
    journal.close()
    size = sum(segment.stat().st_size for segment in segments_of(directory / "journal"))
    ratios = [b / a for a, b in zip(without.rates, durable.rates, strict=True)]
    processor = [b / a for a, b in zip(without.processor_rates, durable.processor_rates, strict=True)]
    return {
        "consumed_tokens_per_second_without": spread(without.rates),
        "consumed_tokens_per_second_with": spread(durable.rates),
        "ratio_with_to_without": spread(ratios),
        "ratio_per_processor_second": spread(processor),
        "event_loop_share_of_time": held_up / durable.seconds,
        "writer_processor_share_of_time": writing / durable.seconds,
        "bytes_per_sampled_token": size / tokens,
        "sampled_tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="examples/gcd/recipe.toml")
    parser.add_argument("--delay", type=float, default=1.0, help="journal_flush_seconds, in seconds")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in a block")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each arm before the first block")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        results = asyncio.run(measure(args, Path(directory)))
    print(results)
    print(save(__file__, {"results": results, "settings": vars(args)}))


if __name__ == "__main__":
    main()
