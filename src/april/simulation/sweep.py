"""A short sweep of measurements on an engine, to which a cost model is fitted.

The sweep works on any `Engine`, with its own samples:
- decoding: `b` samples at once, for several b, after short prompts and after prompts of mixed lengths, as in
  real batches; seconds per decode step, from the tokens received between two polls while all samples were running;
- prefill: one-token responses to prompts of several lengths, a few at once, and to prompts of mixed lengths on all
  slots, as after an interrupt;
- interrupts and weight updates: timed;
- serving: synchronous steps of a scheduler, with short responses and with long ones;
- held out: steps with partial rollouts.

All measurements are repeated `repeats` times, and medians count, so that a drift of the machine's speed does not look
like a property of the engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from april.rollout.engine import Engine, EngineError, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample
from april.simulation.calibration import Calibration, Decoding, Prefill, Serving
from april.simulation.measurement import Update, serve
from april.simulation.workload import Part, Workload

GROUP = 4
"""Samples of a group in the serving measurements."""


async def calibrate(
    engine: Engine,
    update: Update,
    *,
    on_update: KVPolicy = "recompute",
    slots: int | None = None,
    longest: int = 512,
    steps: int = 32,
    repeats: int = 3,
    vocabulary: int = 64,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure an engine that nothing else uses. Samples of the sweep are interrupted and forgotten afterwards.

    Args:
        update: updates the engine to a version.
        on_update: the engine's treatment of KV caches at an update.
        slots: maximum number of samples that decode together; None for the engine's own slots.
        longest: the longest prompt of the sweep, in tokens.
        steps: decode steps of a measurement.
        repeats: repetitions of each measurement; the median counts.
        vocabulary: prompts are drawn from the token ids 2 to this.
        clock: seconds; for an engine of this process, CPU time keeps other processes out of the figures.
        progress: called with a description of the current measurement.

    Raises:
        EngineError: a request failed.
    """
    capacity = engine.capacity
    slots = min(slots or capacity.slots, capacity.slots)
    longest = min(longest, capacity.context_length // 3)
    sweep = Sweep(engine, update, on_update, np.random.default_rng(0), vocabulary, clock)
    await sweep.decode(1, 4, 4)  # the first pass loads kernels and caches
    sweeps = []
    for number in range(1, repeats + 1):

        def progress_of_sweep(what: str, number: int = number) -> None:
            progress(f"sweep {number} of {repeats}: {what}")

        sweeps.append(await sweep.all(slots, longest, steps, progress_of_sweep))
    return Calibration.median(sweeps)


def _spread(longest: int, count: int) -> list[int]:
    """Return `count` lengths from `longest` to 8 tokens, evenly spaced."""
    lengths: list[int] = np.linspace(longest, 8, count).round().astype(int).tolist()
    return lengths


def _lengths(longest: int) -> list[int]:
    return sorted({max(longest // 16, 1), max(longest // 4, 1), max(longest // 2, 1), longest})


class Sweep:
    """Measurements with random prompts, which are in no prefix cache, and responses that only their budget ends."""

    def __init__(
        self,
        engine: Engine,
        update: Update,
        on_update: KVPolicy,
        rng: np.random.Generator,
        vocabulary: int,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._update = update
        self._on_update = on_update
        self._rng = rng
        self._vocabulary = vocabulary
        self._groups = itertools.count()

    async def all(self, slots: int, longest: int, steps: int, progress: Callable[[str], None]) -> Calibration:
        """Make each measurement once."""
        capacity = self._engine.capacity
        result = Calibration(
            capacity.slots, capacity.kv_tokens or capacity.slots * capacity.context_length, self._on_update
        )
        batches = sorted({*(2**k for k in range(slots.bit_length()) if 2**k <= slots), slots})
        for batch, prompt in itertools.product(batches, (8, longest)):
            progress(f"decoding {batch} samples after prompts of up to {prompt} tokens")
            result.decoding.append(await self.decode(batch, prompt, steps))
        prompts = [count * (tokens,) for count in sorted({1, min(4, slots)}) for tokens in _lengths(longest)]
        for lengths in [*prompts, tuple(_spread(longest, slots))]:
            progress(f"prefill of {len(lengths)} prompts of up to {max(lengths)} tokens")
            result.prefill.append(await self.prefill(lengths))
        progress("interrupts and weight updates")
        result.interrupts.append(await self.interrupt(slots))
        began = self._clock()
        await self._update(1)
        result.updates.append(self._clock() - began)
        # 1.5 times the groups that fit: the slots are full at first, and empty gradually at the end.
        groups = -(-3 * slots // (2 * GROUP))
        synchronous = {"partial_rollout": False}
        progress("serving short responses")
        result.serving.append(await self.serve("short", longest / 16, longest, 3, groups, **synchronous))
        progress("serving long responses")
        result.serving.append(await self.serve("long", longest / 2, longest, 1, groups, **synchronous))
        progress("serving partial rollouts")
        half = -(-groups // 2)
        result.held_out.append(
            await self.serve("held out", longest / 4, longest, 3, half, over_sampling_batch_size=2 * half)
        )
        return result

    def _samples(self, count: int, prompt: int, budget: int) -> list[Sample]:
        sampling = SamplingParams(max_tokens=budget, temperature=1.0)
        made = []
        for _ in range(count):
            ids = tuple(self._rng.integers(2, self._vocabulary, prompt).tolist())
            number, seed = next(self._groups), int(self._rng.integers(2**60))
            made.append(Sample(number, 0, ids, sampling, seed, id=f"calibration {number}"))
        return made

    async def _receive(self, tokens: dict[str, int], enough: int) -> None:
        """Count received tokens until every sample has `enough` tokens."""
        while min(tokens.values()) < enough:
            for chunk in await self._engine.poll():
                if chunk.error is not None:
                    raise EngineError(f"a request of the calibration failed: {chunk.error}")
                tokens[chunk.sample_id] += len(chunk.token_ids)
                if chunk.finish is not None and tokens[chunk.sample_id] < enough:
                    raise EngineError(
                        f"a response of the calibration ended after {tokens[chunk.sample_id]} tokens, where {enough} "
                        "are needed: give the engine a longer context (context_length)"
                    )

    async def _stop(self, samples: Sequence[Sample]) -> None:
        await self._engine.interrupt()
        self._engine.forget(sample.id for sample in samples)

    async def decode(self, batch: int, prompt: int, steps: int) -> Decoding:
        """Decode `batch` samples together until each has `steps` tokens more than any had when all had started.

        Their prompts have 8 to `prompt` tokens, evenly spread.
        """
        lengths = _spread(prompt, batch)
        samples = [sample for length in lengths for sample in self._samples(1, length, self._budget(prompt))]
        tokens = {sample.id: 0 for sample in samples}
        for sample in samples:
            self._engine.submit(sample)
        # Two tokens of each sample: every prefill is over, and all samples decode.
        await self._receive(tokens, 2)
        began, before = self._clock(), sum(tokens.values())
        await self._receive(tokens, max(tokens.values()) + steps)
        seconds, after = self._clock() - began, sum(tokens.values())
        await self._stop(samples)
        # Tokens grow linearly during the measurement, so the mean of both ends is the mean of all steps.
        kv_tokens = sum(lengths) + (before + after) / 2
        return Decoding(batch, kv_tokens, seconds / ((after - before) / batch))

    def _budget(self, prompt: int) -> int:
        return min(self._engine.capacity.context_length - prompt, 4096)

    async def prefill(self, lengths: tuple[int, ...]) -> Prefill:
        samples = [sample for length in lengths for sample in self._samples(1, length, 1)]
        received = {sample.id: 0 for sample in samples}
        began = self._clock()
        for sample in samples:
            self._engine.submit(sample)
        await self._receive(received, 1)
        seconds = self._clock() - began
        await self._stop(samples)
        return Prefill(lengths, seconds)

    async def serve(self, name: str, median: float, longest: int, steps: int, groups: int, **settings: Any) -> Serving:
        """Serve `steps` steps of `groups` groups with a median response of `median` tokens, at most `longest`."""
        workload = Workload(
            name,
            (Part(median, 0.6),),
            max_tokens=longest,
            prompt_tokens=max(longest // 4, 1),
            rollout_batch_size=groups,
            n_samples_per_prompt=GROUP,
        )
        outcome = await serve(
            self._engine,
            workload,
            self._update,
            steps=steps,
            vocabulary=self._vocabulary,
            rng=self._rng,
            clock=self._clock,
            **settings,
        )
        return Serving(workload, steps, settings, outcome.rollout_seconds)

    async def interrupt(self, batch: int) -> float:
        """Return seconds from an interrupt of `batch` samples to the last partial response."""
        samples = self._samples(batch, 8, self._budget(8))
        tokens = {sample.id: 0 for sample in samples}
        for sample in samples:
            self._engine.submit(sample)
        await self._receive(tokens, 2)
        began = self._clock()
        await self._engine.interrupt()
        seconds = self._clock() - began
        self._engine.forget(sample.id for sample in samples)
        return seconds
