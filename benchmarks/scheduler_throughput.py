"""Streamed chunks per second that the scheduler takes from a costless engine, with 2,000 samples in flight.

Two engines that do no work: one that hands out a chunk for every sample at each poll, as the embedded engine does, and
one async generator per sample (`StreamEngine`), as a server's client does. One core, by its processor time, because
the machine may be shared. The bar is 50,000 chunks/s.

    python benchmarks/scheduler_throughput.py
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from record import save, spread

from april import (
    Capacity,
    Chunk,
    FinishReason,
    Prompt,
    RolloutParams,
    RolloutScheduler,
    Sample,
    SamplingParams,
    StreamEngine,
)

GROUPS, SIZE, LENGTH = 250, 8, 100


class FreeEngine:
    """One token for every sample in flight at each poll."""

    def __init__(self) -> None:
        self.capacity = Capacity(GROUPS * SIZE, 1 << 20)
        self.flight: dict[str, tuple[int, int]] = {}
        self.version = 0

    @property
    def running(self) -> int:
        return len(self.flight)

    def submit(self, sample: Sample) -> None:
        # Lengths from 50 to 150 tokens, so that groups complete one after the other.
        self.flight[sample.id] = (sample.length, LENGTH // 2 + sample.seed % LENGTH)

    async def poll(self) -> list[Chunk]:
        await asyncio.sleep(0)
        chunks = []
        for id, (length, end) in list(self.flight.items()):
            if length + 1 >= end:
                del self.flight[id]
                chunks.append(Chunk(id, (5,), (-1.0,), self.version, FinishReason.STOP))
            else:
                self.flight[id] = (length + 1, end)
                chunks.append(Chunk(id, (5,), (-1.0,), self.version))
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        for id in list(self.flight) if sample_ids is None else sample_ids:
            self.flight.pop(id, None)
        return []

    async def update_weights(self, version: int, weights: Any = None) -> None:
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None: ...

    async def close(self) -> None: ...


async def generate(sample: Sample) -> AsyncIterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    for _ in range(sample.length, LENGTH // 2 + sample.seed % LENGTH):
        await asyncio.sleep(0)
        yield (5,), (-1.0,)


async def score(prompt: Prompt, sample: Sample) -> float:
    return 1.0


async def measure(engine: Any, steps: int) -> float:
    """Chunks a second of processor time over `steps` steps of 125 groups, 250 in flight."""
    prompts = (Prompt((1, 2), str(i)) for i in itertools.count())
    settings = SamplingParams(max_tokens=2 * LENGTH)
    scheduler = RolloutScheduler(
        engine,
        prompts,
        score,
        RolloutParams(rollout_batch_size=GROUPS // 2, over_sampling_batch_size=GROUPS, n_samples_per_prompt=SIZE),
        sampling=settings,
    )
    async with scheduler:
        began = time.process_time()
        chunks = 0
        for _ in range(steps):
            chunks += (await scheduler.next_batch()).sampled_tokens
            await scheduler.update_weights()
        return chunks / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measurements of each engine, in turn")
    parser.add_argument("--steps", type=int, default=4, help="steps in a measurement")
    args = parser.parse_args()
    engines = {
        "polled engine": FreeEngine,
        "one stream a sample": lambda: StreamEngine(generate, Capacity(GROUPS * SIZE, 1 << 20)),
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.runs):
        for name, make in engines.items():
            rates[name].append(asyncio.run(measure(make(), args.steps)))
    results = {name: spread(values) for name, values in rates.items()}
    for name, result in results.items():
        print(f"{name}: {result['median']:,.0f} chunks/s ({result['min']:,.0f} to {result['max']:,.0f})")
    print(save(__file__, {"samples_under_way": GROUPS * SIZE, "chunks_per_second": results}))


if __name__ == "__main__":
    main()
