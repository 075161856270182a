"""Long runs with random faults: memory, open files and tasks stay constant, and no token is lost.

    python benchmarks/soak.py simulated --samples 200000
    python benchmarks/soak.py embedded --minutes 30

`simulated` runs the scheduler over a simulated engine in virtual time, `embedded` over a pool of two embedded engines
on one small Qwen3, in real time, with rewards in worker processes. In both, requests fail, some groups' requests always
fail, and rewards raise, are no numbers, or hang; in `embedded` engines also die and recover, and rewards end their
process or exceed their memory limit.

After every step the benchmark checks that each admitted group is in exactly one place, that no group was trained on
twice, and that every token of the engine is in exactly one sample. Each part writes its section of soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from record import machine

from april import (
    Chunk,
    Engine,
    EngineError,
    FaultSettings,
    Prompt,
    RolloutBatch,
    RolloutParams,
    RolloutScheduler,
    Sample,
    SamplingParams,
)
from april.rollout.wrapped_engine import WrappedEngine
from april.tasks.isolation import RewardWorkers

MIB = 2**20
FAILING, CURSED, DYING = 0.02, 0.002, 0.002
"""Shares of requests that fail, of groups whose requests all fail, and of polls in which an embedded engine dies."""
POINTS = 120
"""Measurements kept in the JSON file."""


class Faulty(WrappedEngine):
    """An engine whose requests fail now and then, and which may die."""

    def __init__(self, engine: Engine, seed: int, dying: float = 0.0) -> None:
        super().__init__(engine)
        self.faults: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._dying = dying
        self._failed: list[Chunk] = []

    def submit(self, sample: Sample) -> None:
        cursed = random.Random(sample.group_id).random() < CURSED
        if cursed or self._rng.random() < FAILING:
            self.faults["requests failed"] += 1
            self._failed.append(Chunk(sample.id, (), (), 0, error="a fault was injected"))
        else:
            super().submit(sample)

    async def poll(self) -> list[Chunk]:
        if self._rng.random() < self._dying:
            self.faults["engines died"] += 1
            raise EngineError("a death was injected")
        if self._failed:
            return self._take([])
        return self._take(await super().poll())

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        self._failed = [chunk for chunk in self._failed if named is not None and chunk.sample_id not in named]
        return self._take(await super().interrupt(named))

    def _take(self, chunks: list[Chunk]) -> list[Chunk]:
        failed, self._failed = self._failed, []
        return chunks + failed


class Counted(WrappedEngine):
    """An engine whose tokens are counted as it hands them out."""

    tokens = 0

    async def poll(self) -> list[Chunk]:
        return self._counted(await super().poll())

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        return self._counted(await super().interrupt(sample_ids))

    def _counted(self, chunks: list[Chunk]) -> list[Chunk]:
        self.tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return chunks


class Watch:
    """Checks every step, and measures the process after it."""

    def __init__(self, scheduler: RolloutScheduler, tokens: Callable[[], int]) -> None:
        self.scheduler = scheduler
        self.tokens = tokens
        self.trained = bytearray()
        self.samples = 0
        self.counts: Counter[str] = Counter()
        self.points: list[dict[str, float]] = []
        self._began = time.perf_counter()

    def look(self, step: RolloutBatch) -> None:
        buffer = self.scheduler.buffer
        buffer.check()
        assert buffer.sampled_tokens == self.tokens(), "a token was lost between engine and sample"
        self.trained.extend(bytes(buffer.admitted - len(self.trained)))
        for id in [group.id for group in step.groups] + [id for id, _ in step.rejections]:
            assert not self.trained[id], f"group {id} left twice"
            self.trained[id] = 1
        assert sum(self.trained) == buffer.admitted - len(buffer), "a group is nowhere"
        assert len(buffer) <= step.target, "more groups are under way than admission wanted"
        self.samples += sum(len(group.samples) for group in step.groups)
        self.counts["quarantined groups"] += len(step.quarantined)
        for failure in step.failures:
            self.counts[f"{failure.kind} failures"] += 1
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.points.append(
            {
                "seconds": round(time.perf_counter() - self._began, 1),
                "samples": self.samples,
                "resident_mib": round(resident / MIB, 1),
                "open_files": len(os.listdir("/proc/self/fd")),
                "tasks": len(asyncio.all_tasks()),
                "groups_under_way": len(buffer),
            }
        )

    def result(self) -> dict[str, Any]:
        """First and second half after a warm-up of a fifth; flat means that the second is like the first."""
        warm = self.points[len(self.points) // 5 :]
        halves = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        summary = {}
        for name in ("resident_mib", "open_files", "tasks", "groups_under_way"):
            values = [[point[name] for point in half] for half in halves]
            summary[name] = [{"median": statistics.median(half), "min": min(half), "max": max(half)} for half in values]
        buffer = self.scheduler.buffer
        return {
            "samples_trained_on": self.samples,
            "steps": len(self.points),
            "seconds": self.points[-1]["seconds"],
            "tokens": buffer.sampled_tokens,
            "discarded_tokens": buffer.discarded_tokens,
            "faults": dict(self.counts),
            "first_and_second_half_after_warm_up": summary,
            "points": self.points[:: max(1, len(self.points) // POINTS)],
        }


def prompts(length: int = 16) -> Iterator[Prompt]:
    rng = random.Random(0)
    return (Prompt(tuple(rng.randrange(4, 100) for _ in range(length)), str(i)) for i in itertools.count())


async def flaky(prompt: Prompt, sample: Sample) -> float:
    """A reward that raises, is no number, or never comes, one time in a thousand each."""
    luck = sample.seed % 1000
    if luck == 0:
        raise RuntimeError("a fault was injected")
    if luck == 1:
        await asyncio.sleep(1e9)
    return float("nan") if luck == 2 else float(sample.length % 2)


def flaky_in_a_process(seed: int, length: int) -> float:
    luck = seed % 1000
    if luck == 0:
        raise RuntimeError("a fault was injected")
    if luck == 1:
        time.sleep(1e9)
    if luck == 2:
        os._exit(7)
    if luck == 3:
        bytearray(2**40)
    return float("nan") if luck == 4 else float(length % 2)


async def go_on(watch: Watch, enough: Callable[[], bool], after: Callable[[RolloutBatch], Awaitable[None]]) -> None:
    while not enough():
        step = await watch.scheduler.next_batch()
        watch.look(step)
        await after(step)
        for attempt in itertools.count():
            try:
                await watch.scheduler.update_weights()
                break
            except EngineError:  # all replicas are lost in this moment, and on their way back
                watch.counts["updates tried again"] += 1
                if attempt == 100:
                    raise
                await asyncio.sleep(0.5)
        gc.collect()


def simulated(samples: int) -> dict[str, Any]:
    from april.simulation.cost_model import CostModel
    from april.simulation.engine import SimulatedEngine
    from april.simulation.virtual_time import run
    from april.simulation.workload import WORKLOADS

    cost = CostModel(slots=256, kv_tokens=2_000_000, decode_batches=(1, 256), decode_seconds=(0.008, 0.02))
    workload = WORKLOADS["heavy"]
    faulty = Faulty(SimulatedEngine(cost, workload, replicas=2, resolution=0.05), seed=1)
    engine = Counted(faulty)

    async def main() -> dict[str, Any]:
        scheduler = RolloutScheduler(
            engine,
            workload.prompts(),
            flaky,
            RolloutParams(rollout_batch_size=32, over_sampling_batch_size=64),
            sampling=SamplingParams(max_tokens=workload.max_tokens),
            faults=FaultSettings(on_reward_error="reject", reward_timeout=30.0),
        )
        watch = Watch(scheduler, lambda: engine.tokens)
        async with scheduler:
            await go_on(watch, lambda: watch.samples >= samples, lambda step: asyncio.sleep(1.0))
            return watch.result() | {"injected": dict(faulty.faults)}

    return run(main())


def embedded(minutes: float) -> dict[str, Any]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from april.engines.embedded import EmbeddedEngine
    from april.engines.pool import EnginePool

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    settings = {"max_num_seqs": 16, "kv_cache_bytes": 8 * MIB, "on_update": "keep", "stream_interval": 8}
    replicas = [Faulty(EmbeddedEngine(model, **settings), seed, DYING) for seed in range(2)]
    pool = Counted(EnginePool(replicas, patience=120.0))
    until = time.perf_counter() + 60 * minutes

    async def main() -> dict[str, Any]:
        limits = {"most": 1, "time_limit": 5.0, "memory_limit": 2**30}
        async with RewardWorkers(flaky_in_a_process, **limits) as workers:  # type: ignore[arg-type]

            async def reward(prompt: Prompt, sample: Sample) -> float:
                value: float = await workers(sample.seed, sample.length)
                return value

            scheduler = RolloutScheduler(
                pool,
                prompts(),
                reward,
                RolloutParams(
                    rollout_batch_size=8, over_sampling_batch_size=16, n_samples_per_prompt=4, max_staleness=3
                ),
                sampling=SamplingParams(max_tokens=128, stop_token_ids=(1, 2)),
                faults=FaultSettings(on_reward_error="reject"),
            )
            watch = Watch(scheduler, lambda: pool.tokens)
            async with scheduler:
                await go_on(watch, lambda: time.perf_counter() > until, lambda step: asyncio.sleep(0))
                injected = sum((replica.faults for replica in replicas), Counter())
                result = watch.result() | {"injected": dict(injected)}
        await pool.close()
        return result

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("simulated", "embedded"))
    parser.add_argument("--samples", type=int, default=200_000, help="samples to train on, of the simulated part")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the embedded part")
    args = parser.parse_args()
    result = simulated(args.samples) if args.part == "simulated" else embedded(args.minutes)
    path = Path(__file__).with_suffix(".json")
    sections = json.loads(path.read_text()) if path.exists() else {}
    command = " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    sections[args.part] = {"command": command, "machine": machine(), **result}
    path.write_text(json.dumps(sections, indent=1) + "\n")
    for name, halves in result["first_and_second_half_after_warm_up"].items():
        print(name, *halves, sep="\n  ")
    print({name: value for name, value in result.items() if isinstance(value, int | float | dict)}["faults"])
    print(path)


if __name__ == "__main__":
    main()
