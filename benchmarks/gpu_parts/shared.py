"""Engine and trainer in turn on one GPU against synchronous rollouts, and against engine and trainer on two GPUs.

Every arm generates the same responses and trains on the same step each time; rates are over generation, training and
turns. In `resident` the trainer's state stays on the GPU. In `shared` moments and master weights are in host memory
while the engine generates, and the engine has no KV cache while the trainer trains. `split` needs a second GPU, on
which the engine generates during training.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from gpu_parts.arms import served, workload
from gpu_parts.bench import Bench, rolled_out
from parts import Figures

from april.engines.embedded import EmbeddedEngine
from april.rollout.batch import RolloutBatch
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.simulation.measurement import GivenLengths
from april.simulation.run import scheduler_of
from april.simulation.workload import Workload
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.offload import Part as TrainerPart

AWAY = frozenset({TrainerPart.PARAMETERS, TrainerPart.OPTIMIZER})
"""Master weights and moments; the engine computes with the rounded copy."""


class Turns:
    """Trains after each step of an arm, and times what a turn consists of."""

    def __init__(self, bench: Bench, learner: LocalLearner, engine: EmbeddedEngine, step: RolloutBatch) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._bench, self._learner, self._engine, self._step = bench, learner, engine, step
        self._number = 0

    def train(self) -> None:
        self._number += 1
        self._timed("train", lambda: self._learner.train(self._step, self._number))

    async def resident(self, version: int) -> None:
        if version:
            self._engine.forget()
            self.train()
        await self._engine.update_weights(version)

    async def shared(self, version: int) -> None:
        if version:
            await self._engine.sleep()
            self._timed("to device", self._learner.to_device)
            self.train()
        self._timed("to host", lambda: self._learner.to_host(AWAY))
        if version:
            await self._engine.wake_weights()
        await self._engine.update_weights(version)
        if version:
            await self._engine.wake_kv_cache()

    def _timed(self, name: str, work: Callable[[], Any]) -> None:
        began = self._bench.clock()
        work()
        self.seconds.setdefault(name, []).append(self._bench.clock() - began)


def measure(bench: Bench) -> Figures:
    work = workload(bench)
    step = rolled_out(bench, bench.model(bench.shape), bench.size(8, 2), work.prompt_tokens, bench.size(128, 16))
    more = {"over_sampling_batch_size": 3 * work.rollout_batch_size // 2}
    base = 0.0
    for name, settings in {"synchronous": {"partial_rollout": False}, "resident": more, "shared": more}.items():
        learner, engine = parts_of(bench)
        turns = Turns(bench, learner, engine, step)
        update: Callable[[int], Awaitable[None]] = turns.shared if name == "shared" else turns.resident
        reset_peak(bench)
        found = served(bench, engine, work, update, base, settings)
        base = base or found["consumed_tokens_per_second"]
        yield (
            name,
            {
                **found,
                "turn_seconds": {part: max(seconds) for part, seconds in turns.seconds.items()},
                "host_bytes": learner.offload.host_bytes,
                "moved_bytes": learner.offload.moved_bytes,
                "peak_bytes": torch.cuda.max_memory_allocated() if bench.on_gpu else None,
            },
        )
        if name == "shared":
            yield "freed", freed(bench, learner)
        del learner, engine, turns, update
    if bench.on_gpu and torch.cuda.device_count() < 2:
        yield "split", "needs a second GPU"
        return
    rate, staleness = asyncio.run(split(bench, work, step, more))
    yield (
        "split",
        {"consumed_tokens_per_second": rate, "ratio_to_synchronous": rate / base, "mean_staleness": staleness},
    )


def parts_of(bench: Bench) -> tuple[LocalLearner, EmbeddedEngine]:
    """A learner with master weights, and an engine that computes with its rounded copy."""
    recipe = bench.recipe()
    recipe.model.compute_dtype = "bfloat16"
    learner = LocalLearner(bench.model(bench.shape, torch.float32), LearnerSettings.of(recipe))
    return learner, engine_on(bench, learner.served)


def engine_on(bench: Bench, model: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        model, max_num_seqs=bench.size(64, 4), context_length=bench.size(1024, 256), stop_token_ids=()
    )


def reset_peak(bench: Bench) -> None:
    if bench.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def freed(bench: Bench, learner: LocalLearner) -> dict[str, Any]:
    """What a round trip of everything takes, frees on the device, and changes."""
    learner.to_device()
    before = [master.clone() for master in learner.masters.tensors[:4]]
    free = torch.cuda.mem_get_info()[0] if bench.on_gpu else 0
    began, moved = bench.clock(), learner.offload.moved_bytes
    learner.to_host()
    left = bench.clock()
    gained = torch.cuda.mem_get_info()[0] - free if bench.on_gpu else None
    learner.to_device()
    ended, bytes_each_way = bench.clock(), (learner.offload.moved_bytes - moved) / 2
    same = all(torch.equal(a, b) for a, b in zip(before, learner.masters.tensors, strict=False))
    return {
        "bytes": bytes_each_way,
        "device_bytes_gained": gained,
        "to_host_bytes_per_second": bytes_each_way / (left - began),
        "to_device_bytes_per_second": bytes_each_way / (ended - left),
        "equal": same,
    }


async def split(bench: Bench, work: Workload, step: RolloutBatch, settings: dict[str, Any]) -> tuple[float, float]:
    """Consumed tokens/s and mean staleness with an engine on a second device, which generates during training."""
    learner, _ = parts_of(bench)
    model = copy.deepcopy(learner.served).requires_grad_(False).to("cuda:1" if bench.on_gpu else "cpu")
    engine = engine_on(bench, model)

    async def update(version: int) -> None:
        await engine.interrupt()
        await engine.update_weights(version, dict(learner.served.named_parameters()))

    steps = bench.size(4, 2)
    count = (steps + 2) * work.rollout_batch_size + settings["over_sampling_batch_size"]
    sampling, size = SamplingParams(max_tokens=work.max_tokens), work.n_samples_per_prompt
    prompts = [
        Prompt(tuple(2 + i % (bench.shape.vocabulary - 2) for i in range(work.prompt_tokens)), prompt.id)
        for prompt in itertools.islice(work.prompts(), count)
    ]
    groups = (Group.start(i, prompt, size, sampling, 0) for i, prompt in enumerate(prompts))
    given = GivenLengths(engine, work, groups, update)
    tokens, seconds, staleness = 0, 0.0, []
    async with scheduler_of(given, work, iter(prompts), settings, 0, overlap=True) as rollouts:
        for number in range(1, steps + 1):
            began = time.perf_counter()
            batch = await rollouts.next_batch()
            await asyncio.to_thread(learner.train, step, number)
            await rollouts.update_weights()
            if number > 1:  # the first step has nothing to overlap with
                tokens, seconds = tokens + batch.consumed_tokens, seconds + time.perf_counter() - began
                staleness.append(float(batch.staleness.mean()))
    return tokens / seconds, sum(staleness) / len(staleness)
