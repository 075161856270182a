"""Real training runs on the clock of an accelerator: an event loop whose time is the reckoned work of the run.

The embedded engine samples and the trainer trains as always, on a CPU. The loop's clock advances by what each forward
pass, training step, weight update and interrupt would take by the simulator's cost model. So `april train` reports, and
automatic N' learns, seconds of the accelerator.

Invariants:
- evaluations take no time;
- equal work takes equal time: the load of the machine changes nothing but CPU seconds.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from april.engines.embedded.engine import EmbeddedEngine
from april.rollout.batch import RolloutBatch
from april.rollout.scheduler import RolloutScheduler
from april.simulation.cost_model import CostModel
from april.simulation.hardware import GPUS, MODELS, roofline, training_seconds_per_token
from april.training.held_out_evaluation import HeldOutEvaluation
from april.training.local import LocalLearner

GPU, GPU_COUNT, MODEL = "h100", 2, "qwen3-8b"
"""Two GPUs, because the KV caches of 128 long responses do not fit one beside the weights."""
TOKENS = 32
"""Tokens that a token of the small policy stands for: its budget of 512 is then the 16,384 of the paper."""


class StepWork(NamedTuple):
    """Seconds of one training step."""

    rollout: float
    """Rollouts on the accelerator."""
    training: float
    """Training and weight update on the accelerator."""
    cpu_rollout: float
    cpu_training: float


class AcceleratorLoop(asyncio.SelectorEventLoop):
    """An event loop on the accelerator's clock; it also advances while the loop waits for a timer and nothing else."""

    def __init__(self) -> None:
        self.work = 0.0
        """Reckoned seconds."""
        self.idle = 0.0
        """Seconds spent waiting for timers."""
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.work + self.idle


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: AcceleratorLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        if not ready and timeout is not None and timeout > 0:
            self._loop.idle += timeout
        return ready


class Accelerator:
    """Counts the work of one run, and advances the loop's clock by it. Use `observed` around the run."""

    def __init__(self, loop: AcceleratorLoop, slots: int) -> None:
        gpu = GPUS[GPU].times(GPU_COUNT)
        self.loop = loop
        self.cost: CostModel = roofline(gpu, MODELS[MODEL])
        self.steps: list[StepWork] = []
        self._base = self.cost.base(max(slots, self.cost.slots))
        self._train_token = training_seconds_per_token(gpu, MODELS[MODEL], 1)
        self._evaluating = False
        self._began = self._cpu_began = self._rolled_out = self._cpu_rolled_out = 0.0

    def advance(self, seconds: float) -> None:
        if not self._evaluating:
            self.loop.work += seconds

    def decoding(self, samples: int, kv_tokens: float) -> float:
        """Return seconds of the decode steps that one step of the small policy stands for."""
        if not samples:
            return 0.0
        return TOKENS * float(self._base[samples] + TOKENS * kv_tokens * self.cost.kv_token_seconds)

    def prefill(self, sizes: Iterable[int]) -> float:
        return sum(
            TOKENS * n * (self.cost.prefill_token_seconds + TOKENS * n * self.cost.prefill_pair_seconds) for n in sizes
        )

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Have the run inside the block advance the clock."""
        accelerator, engine, learner = self, EmbeddedEngine, LocalLearner
        compute, interrupt, update = engine._compute, engine.interrupt, engine.update_weights
        collect, train, evaluate = RolloutScheduler.next_batch, learner.train, HeldOutEvaluation.run

        def computed(self: EmbeddedEngine) -> Any:
            found = compute(self)
            chunks, step, _ = found
            drafts = [len(each.draft) for each in step.sequences if each.draft]
            held = sum(each.kv_length for each in step.sequences)
            sizes = [size for _, size in chunks] + drafts
            accelerator.advance(accelerator.decoding(len(step.sequences), held) + accelerator.prefill(sizes))
            return found

        async def interrupted(self: EmbeddedEngine, sample_ids: Any = None) -> Any:
            if self._scheduler.in_flight:
                accelerator.advance(accelerator.cost.interrupt_seconds)
            return await interrupt(self, sample_ids)

        async def updated(self: EmbeddedEngine, version: int, weights: Any = None) -> None:
            accelerator.advance(accelerator.cost.update_seconds)
            await update(self, version, weights)
            accelerator.end_step()

        async def collected(self: RolloutScheduler, last: bool = False) -> RolloutBatch:
            accelerator.begin_step()
            batch = await collect(self, last)
            accelerator.end_rollout()
            return batch

        def trained(self: LocalLearner, batch: RolloutBatch, number: int) -> dict[str, float]:
            found = train(self, batch, number)
            accelerator.advance(TOKENS * batch.consumed_tokens * accelerator._train_token)
            return found

        async def evaluated(self: HeldOutEvaluation) -> Any:
            accelerator._evaluating = True
            try:
                return await evaluate(self)
            finally:
                accelerator._evaluating = False

        patches = (
            (engine, "_compute", compute, computed),
            (engine, "interrupt", interrupt, interrupted),
            (engine, "update_weights", update, updated),
            (RolloutScheduler, "next_batch", collect, collected),
            (learner, "train", train, trained),
            (HeldOutEvaluation, "run", evaluate, evaluated),
        )
        for owner, name, _, ours in patches:
            setattr(owner, name, ours)
        try:
            yield
        finally:
            for owner, name, original, _ in patches:
                setattr(owner, name, original)

    def begin_step(self) -> None:
        self._began, self._cpu_began, self._rolled_out = self.loop.work, time.process_time(), 0.0

    def end_rollout(self) -> None:
        self._rolled_out, self._cpu_rolled_out = self.loop.work, time.process_time()

    def end_step(self) -> None:
        if not self._rolled_out:
            return  # the update before the first step
        self.steps.append(
            StepWork(
                self._rolled_out - self._began,
                self.loop.work - self._rolled_out,
                self._cpu_rolled_out - self._cpu_began,
                time.process_time() - self._cpu_rolled_out,
            )
        )
        self._rolled_out = 0.0
