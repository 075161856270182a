"""A cost model fitted to an engine: a short sweep, and how far the fit is off.

Four sweeps on whatever keeps the `Engine` protocol, each on samples of the sweep's own:
- decoding: `b` samples at once, for several b, after short prompts and after prompts of mixed lengths, as real batches
  are mixed; seconds per decode step, from the tokens that came out between two polls while all of them ran. Fitted:
  base(b), and the cost of a held token;
- prefill: one-token responses to prompts of several lengths, several at once. Fitted: the cost of a token, of a pair of
  tokens, of a request;
- serving: more requests than slots, of mixed lengths, from the first to the last. What they take longer than the model
  so far says is divided among the requests: the cost of samples coming and going;
- interrupts and weight updates: timed, medians.

The model says what an engine does, so it is fitted to what is seen outside: seconds between submitting and receiving.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from april.config import Recipe
from april.engine import Engine, EngineError
from april.engines.simulated import SimulatedEngine
from april.simulation.cost_model import CostModel
from april.simulation.virtual_time import run
from april.trajectory import Sample, SamplingParams

Update = Callable[[int], Awaitable[None]]
"""Brings the engine to a policy version, as a training step would."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """`batch` samples decoded together while they held `kv_tokens` on average: seconds of a step."""

    batch: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """`requests` prompts of `tokens` tokens each, submitted together: seconds until each had its only token."""

    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Serving:
    """Requests of (prompt, response) tokens, submitted together: seconds until the last one had finished."""

    requests: tuple[tuple[int, int], ...]
    seconds: float


Measured = TypeVar("Measured", Decoding, Prefill, Serving)


@dataclass(slots=True)
class Calibration:
    """What a sweep measured."""

    slots: int
    kv_tokens: int
    decoding: list[Decoding] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    interrupts: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    def fit(self, source: str) -> CostModel:
        """The cost model nearest to the measurements, by relative least squares with no cost below zero.

        Serving is simulated to see what the model misses, so this cannot be called inside an event loop.
        """
        batches = sorted({m.batch for m in self.decoding})
        columns = np.zeros((len(self.decoding), len(batches) + 1))
        for row, m in zip(columns, self.decoding, strict=True):
            row[batches.index(m.batch)] = 1.0
            row[-1] = m.kv_tokens
        measured = np.array([m.seconds for m in self.decoding])
        *base, kv_seconds = _fit(columns, measured).tolist()
        decode_error = _error(columns @ np.array([*base, kv_seconds]), measured)

        rows = [(m.requests * m.tokens, m.requests * m.tokens**2, m.requests, 1.0) for m in self.prefill]
        prefill = np.array(rows, dtype=float)
        waited = np.array([m.seconds for m in self.prefill])
        costs = _fit(prefill, waited)
        cost = CostModel(
            slots=self.slots,
            kv_tokens=self.kv_tokens,
            decode_batches=tuple(batches),
            decode_seconds=tuple(max(seconds, 1e-9) for seconds in base),
            kv_token_seconds=kv_seconds,
            prefill_token_seconds=float(costs[0]),
            prefill_pair_seconds=float(costs[1]),
            request_seconds=float(costs[2]),
            update_seconds=statistics.median(self.updates) if self.updates else 0.0,
            interrupt_seconds=statistics.median(self.interrupts) if self.interrupts else 0.0,
            source=source,
            errors={"decode": decode_error, "prefill": _error(prefill @ costs, waited)},
        )
        return self._with_serving(cost)

    def _with_serving(self, cost: CostModel) -> CostModel:
        """The cost of a request such that serving takes as long as it took."""
        if not self.serving:
            return cost
        missed = [m.seconds - simulated_seconds(cost, m.requests) for m in self.serving]
        each = sum(missed) / sum(len(m.requests) for m in self.serving)
        cost = replace(cost, request_seconds=max(cost.request_seconds + each, 0.0))
        predicted = np.array([simulated_seconds(cost, m.requests) for m in self.serving])
        error = _error(predicted, np.array([m.seconds for m in self.serving]))
        return replace(cost, errors={**cost.errors, "serving": error})


class Endless:
    """Responses that only their budget ends."""

    def lengths(self, prompts: NDArray[np.int64], seeds: Any, versions: Any) -> NDArray[np.int64]:
        return np.full(len(prompts), np.iinfo(np.int64).max)


def simulated_seconds(cost: CostModel, requests: Sequence[tuple[int, int]]) -> float:
    """What the cost model says that serving takes."""

    async def serve() -> float:
        engine = SimulatedEngine(cost, Endless())
        for number, (prompt, response) in enumerate(requests):
            sampling = SamplingParams(max_tokens=response)
            engine.submit(Sample(number, 0, (number, *[0] * (prompt - 1)), sampling, 0))
        while await engine.poll():
            pass
        return asyncio.get_running_loop().time()

    return run(serve())


def _fit(columns: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of the relative error with coefficients of at least 0: those below it are left out, worst first."""
    weighted = columns / measured[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq((weighted / scale)[:, kept], np.ones(len(measured)), rcond=None)[0]
        if not len(found) or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = np.zeros(columns.shape[1])
    result[kept] = found / scale[kept]
    return result


def _error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


async def calibrate(
    engine: Engine,
    *,
    update: Update | None = None,
    slots: int | None = None,
    longest: int = 512,
    steps: int = 32,
    repeats: int = 3,
    vocabulary: int = 64,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure an engine that nothing else uses. What a sweep leaves behind is interrupted and forgotten.

    Args:
        update: brings the engine to a version; without it weight updates are not measured.
        slots: decode up to so many samples together; the engine's own slots if None.
        longest: the longest prompt of the sweep, in tokens.
        steps: decode steps of a measurement.
        repeats: of each measurement; the median counts.
        vocabulary: prompts are drawn from the token ids 2 to this.
        clock: seconds; for an engine of this process, CPU time keeps other processes out of the figures.
        progress: told what is being measured.

    Raises:
        EngineError: a request failed.
    """
    capacity = engine.capacity
    slots = min(slots or capacity.slots, capacity.slots)
    longest = min(longest, capacity.context_length // 2)
    sweep = Sweep(engine, np.random.default_rng(0), vocabulary, clock)
    result = Calibration(capacity.slots, capacity.kv_tokens or capacity.slots * capacity.context_length)
    await sweep.decode(1, 4, 4)  # the first pass loads kernels and caches
    batches = sorted({*(2**k for k in range(slots.bit_length()) if 2**k <= slots), slots})
    for batch, prompt in itertools.product(batches, (8, longest)):
        progress(f"decoding {batch} samples after prompts of up to {prompt} tokens")
        runs = [await sweep.decode(batch, prompt, steps) for _ in range(repeats)]
        result.decoding.append(_median(runs))
    for requests, tokens in itertools.product(sorted({1, min(4, slots)}), _lengths(longest)):
        progress(f"prefill of {requests} prompts of {tokens} tokens")
        waits = [await sweep.prefill(requests, tokens) for _ in range(repeats)]
        result.prefill.append(_median(waits))
    served = [await sweep.serve(4 * slots, longest) for _ in range(repeats)]
    result.serving.append(_median(served))
    for version in range(1, repeats + 1):
        progress("interrupts and weight updates")
        result.interrupts.append(await sweep.interrupt(slots, steps))
        if update is not None:
            began = clock()
            await update(version)
            result.updates.append(clock() - began)
    return result


async def calibrate_recipe(recipe: Recipe, longest: int, repeats: int) -> Calibration:
    """Start the recipe's engine, measure it, and end it again."""
    from april.training.policy import load_policy
    from april.training.serving import WeightHandover, engine_of

    model, tokenizer = load_policy(recipe.model)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        handover = WeightHandover(recipe, model, tokenizer, directory)
        async with engine_of(recipe, model, directory) as engine:

            async def update(version: int) -> None:
                await engine.update_weights(version, handover(version))

            with Console(stderr=True).status("") as status:
                return await calibrate(
                    engine,
                    update=update,
                    longest=longest,
                    repeats=repeats,
                    vocabulary=model.config.vocab_size,
                    progress=status.update,
                )


def _median(runs: list[Measured]) -> Measured:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _lengths(longest: int) -> list[int]:
    return sorted({max(longest // 16, 1), max(longest // 4, 1), max(longest // 2, 1), longest})


class Sweep:
    """Samples made for measuring: random prompts that no cache has seen, and responses that only their budget ends."""

    def __init__(self, engine: Engine, rng: np.random.Generator, vocabulary: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._engine = engine
        self._rng = rng
        self._vocabulary = vocabulary
        self._groups = itertools.count(1 << 47)

    def _samples(self, count: int, prompt: int, budget: int) -> list[Sample]:
        sampling = SamplingParams(max_tokens=budget, temperature=1.0)
        made = []
        for _ in range(count):
            ids = tuple(self._rng.integers(2, self._vocabulary, prompt).tolist())
            made.append(Sample(next(self._groups), 0, ids, sampling, int(self._rng.integers(2**60))))
        return made

    async def _receive(self, waiting: dict[str, int]) -> None:
        """Count what comes, and let go of the samples that are done."""
        for chunk in await self._engine.poll():
            if chunk.error is not None:
                raise EngineError(f"a request of the calibration failed: {chunk.error}")
            waiting[chunk.sample_id] += len(chunk.token_ids)

    async def _stop(self, samples: Sequence[Sample]) -> None:
        await self._engine.interrupt()
        self._engine.forget(sample.id for sample in samples)

    async def decode(self, batch: int, prompt: int, steps: int) -> Decoding:
        """Decode `batch` samples side by side until each has `steps` tokens more than any had when all had started.

        Their prompts have 8 to `prompt` tokens, evenly spread.
        """
        lengths = np.linspace(prompt, 8, batch).round().astype(int).tolist()
        samples = [sample for length in lengths for sample in self._samples(1, length, self._budget(prompt))]
        tokens = {sample.id: 0 for sample in samples}
        for sample in samples:
            self._engine.submit(sample)
        while min(tokens.values()) < 2:
            await self._receive(tokens)
        began, before = self._clock(), sum(tokens.values())
        enough = max(tokens.values()) + steps
        while min(tokens.values()) < enough:
            await self._receive(tokens)
        seconds, after = self._clock() - began, sum(tokens.values())
        await self._stop(samples)
        kv_tokens = sum(lengths) + (before + after) / 2
        return Decoding(batch, kv_tokens, seconds / ((after - before) / batch))

    def _budget(self, prompt: int) -> int:
        return min(self._engine.capacity.context_length - prompt, 4096)

    async def prefill(self, requests: int, tokens: int) -> Prefill:
        samples = self._samples(requests, tokens, 1)
        received = {sample.id: 0 for sample in samples}
        began = self._clock()
        for sample in samples:
            self._engine.submit(sample)
        while not all(received.values()):
            await self._receive(received)
        seconds = self._clock() - began
        await self._stop(samples)
        return Prefill(requests, tokens, seconds)

    async def serve(self, count: int, longest: int) -> Serving:
        """`count` requests, prompts and responses of 8 to `longest` tokens in mixed order."""
        lengths = np.linspace(8, longest, count).round().astype(int)
        requests = list(zip(*(self._rng.permutation(lengths).tolist() for _ in range(2)), strict=True))
        samples = [sample for prompt, response in requests for sample in self._samples(1, prompt, response)]
        received = {sample.id: 0 for sample in samples}
        began = self._clock()
        for sample in samples:
            self._engine.submit(sample)
        wanted = sum(response for _, response in requests)
        while sum(received.values()) < wanted:
            await self._receive(received)
        seconds = self._clock() - began
        await self._stop(samples)
        return Serving(tuple(requests), seconds)

    async def interrupt(self, batch: int, steps: int) -> float:
        """Seconds from an interrupt of `batch` samples to the last partial."""
        samples = self._samples(batch, 8, self._budget(8))
        tokens = {sample.id: 0 for sample in samples}
        for sample in samples:
            self._engine.submit(sample)
        while min(tokens.values()) < 2:
            await self._receive(tokens)
        began = self._clock()
        await self._engine.interrupt()
        seconds = self._clock() - began
        self._engine.forget(sample.id for sample in samples)
        return seconds
