"""A cost model fitted to an engine: a short sweep, and how far the fit is off.

On whatever keeps the `Engine` protocol, on samples of the sweep's own:
- decoding: `b` samples at once, for several b, after short prompts and after prompts of mixed lengths, as real batches
  are mixed; seconds per decode step, from the tokens that came out between two polls while all of them ran. Fitted:
  base(b), and the cost of a held token;
- prefill: one-token responses to prompts of several lengths, several at once, and to as many as there are slots, of
  mixed lengths, as after an interrupt. Fitted: the cost of a token, of a pair of tokens, of a request;
- interrupts and weight updates: timed, medians;
- serving: synchronous steps of a scheduler, of short responses and of long ones. Fitted: how much longer a decode step
  takes in service than in the sweep (samples come and go, and the scheduler takes every token), and what a request
  costs. The model's other terms stay in the proportions that were found;
- held out: steps with partial rollouts, which no constant is fitted to. How far the model is off there is the error
  to expect of it.

The model says what an engine does, so it is fitted to what is seen outside: seconds between submitting and receiving.
All of it is gone through `repeats` times, and medians count, so that a machine whose speed drifts is not taken for an
engine that favours one setting.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from april.config.recipe import Recipe
from april.rollout.engine import Engine, EngineError, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory import Sample
from april.simulation.cost_model import CostModel
from april.simulation.measurement import Update, serve
from april.simulation.run import simulate
from april.simulation.workload import Part, Workload

GROUP = 4
"""Samples of a group while serving."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """`batch` samples decoded together while they held `kv_tokens` on average: seconds of a step."""

    batch: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of `lengths` tokens, submitted together: seconds until each had its only token."""

    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Serving:
    """Steps of a scheduler on a workload: seconds of all of them together, weight updates included."""

    workload: Workload
    steps: int
    settings: dict[str, Any]
    seconds: float

    def predicted(self, cost: CostModel, on_update: KVPolicy) -> float:
        """What the cost model says. Not to be called inside an event loop."""
        return simulate(
            self.workload, cost, steps=self.steps, warm_up=0, on_update=on_update, **self.settings
        ).rollout_seconds


Measured = TypeVar("Measured", Decoding, Prefill, Serving)


@dataclass(slots=True)
class Calibration:
    """What a sweep measured."""

    slots: int
    kv_tokens: int
    on_update: KVPolicy = "recompute"
    decoding: list[Decoding] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    held_out: list[Serving] = field(default_factory=list)
    interrupts: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    @classmethod
    def median(cls, sweeps: Sequence[Calibration]) -> Calibration:
        """The median of each measurement over equal sweeps."""
        first = sweeps[0]
        result = cls(first.slots, first.kv_tokens, first.on_update)
        for name in ("decoding", "prefill", "serving", "held_out"):
            setattr(result, name, [_median(runs) for runs in zip(*(getattr(s, name) for s in sweeps), strict=True)])
        for name in ("interrupts", "updates"):
            setattr(result, name, [second for sweep in sweeps for second in getattr(sweep, name)])
        return result

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

        rows = [(sum(m.lengths), sum(n * n for n in m.lengths), len(m.lengths), 1.0) for m in self.prefill]
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
        cost = self._in_service(cost)
        for name, runs in (("serving", self.serving), ("held out", self.held_out)):
            if runs:
                predicted = np.array([run.predicted(cost, self.on_update) for run in runs])
                cost.errors[name] = _error(predicted, np.array([run.seconds for run in runs]))
        return cost

    def _in_service(self, cost: CostModel) -> CostModel:
        """Decode steps and requests that take as long as they took while serving.

        What one engine does when follows from its decode steps alone, whatever they take, so the seconds of a run are
        linear in each cost, and a run with a changed one gives the coefficient.
        """
        if not self.serving:
            return cost
        free = replace(cost, request_seconds=0.0)
        changes = (_slower(free, 2.0), replace(free, request_seconds=REQUEST))
        columns, rest = np.zeros((len(self.serving), 2)), np.zeros(len(self.serving))
        for i, run in enumerate(self.serving):
            without = run.predicted(free, self.on_update)
            columns[i] = [run.predicted(changed, self.on_update) - without for changed in changes]
            rest[i] = without - columns[i, 0]
        measured = np.array([run.seconds for run in self.serving])
        slowdown, requests = _fit(columns, np.maximum(measured - rest, 1e-9), measured).tolist()
        return replace(_slower(cost, max(slowdown, 1e-3)), request_seconds=requests * REQUEST)


REQUEST = 1e-3
"""Seconds by which a request is made dearer to see what a run makes of it."""


def _slower(cost: CostModel, factor: float) -> CostModel:
    """Decode steps that take `factor` times as long."""
    seconds = tuple(factor * seconds for seconds in cost.decode_seconds)
    return replace(cost, decode_seconds=seconds, kv_token_seconds=factor * cost.kv_token_seconds)


def _fit(
    columns: NDArray[np.float64], wanted: NDArray[np.float64], scale: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Least squares of the error relative to `scale`, by default to what is `wanted`, with coefficients of at least 0:
    those below it are left out, worst first."""
    scale = wanted if scale is None else scale
    weighted, wanted = columns / scale[:, None], wanted / scale
    largest = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq((weighted / largest)[:, kept], wanted, rcond=None)[0]
        if not len(found) or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = np.zeros(columns.shape[1])
    result[kept] = found / largest[kept]
    return result


def _error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


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
    """Measure an engine that nothing else uses. What a sweep leaves behind is interrupted and forgotten.

    Args:
        update: brings the engine to a version.
        on_update: what the engine does with KV caches at an update.
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
    longest = min(longest, capacity.context_length // 3)
    sweep = Sweep(engine, update, on_update, np.random.default_rng(0), vocabulary, clock)
    await sweep.decode(1, 4, 4)  # the first pass loads kernels and caches
    sweeps = []
    for number in range(1, repeats + 1):

        def told(what: str, number: int = number) -> None:
            progress(f"sweep {number} of {repeats}: {what}")

        sweeps.append(await sweep.all(slots, longest, steps, told))
    return Calibration.median(sweeps)


async def calibrate_recipe(recipe: Recipe, longest: int, repeats: int) -> Calibration:
    """Start the recipe's engine, measure it, and end it again."""
    async with idle_engine(recipe) as idle:
        with Console(stderr=True).status("") as status:
            return await idle.calibrate(longest, repeats, status.update)


@dataclass(frozen=True)
class IdleEngine:
    """The engine of a recipe on the recipe's policy, that nothing uses yet."""

    recipe: Recipe
    model: Any
    tokenizer: Any
    engine: Engine
    update: Update

    async def calibrate(self, longest: int, repeats: int, progress: Callable[[str], None]) -> Calibration:
        return await calibrate(
            self.engine,
            self.update,
            on_update=self.recipe.engine.on_update,
            longest=longest,
            repeats=repeats,
            vocabulary=self.model.config.vocab_size,
            progress=progress,
        )


@asynccontextmanager
async def idle_engine(recipe: Recipe) -> AsyncIterator[IdleEngine]:
    """Start the recipe's engine, and end it afterwards."""
    from april.training.engines import engine_of
    from april.training.policy import load_policy
    from april.training.weights import transfer_of

    model, tokenizer = load_policy(recipe.model)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        transfer = transfer_of(recipe, model, tokenizer, directory)
        async with engine_of(recipe, model, directory) as engine:

            async def update(version: int) -> None:
                await engine.update_weights(version, transfer.offer(version))

            yield IdleEngine(recipe, model, tokenizer, engine, update)


def _median(runs: Sequence[Measured]) -> Measured:
    ordered = sorted(runs, key=lambda run: run.seconds)
    return replace(ordered[len(ordered) // 2], seconds=statistics.median(run.seconds for run in runs))


def _spread(longest: int, count: int) -> list[int]:
    """`count` lengths from `longest` to 8 tokens."""
    lengths: list[int] = np.linspace(longest, 8, count).round().astype(int).tolist()
    return lengths


def _lengths(longest: int) -> list[int]:
    return sorted({max(longest // 16, 1), max(longest // 4, 1), max(longest // 2, 1), longest})


class Sweep:
    """Samples made for measuring: random prompts that no cache has seen, and responses that only their budget ends."""

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
        """Each measurement once."""
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
        result.interrupts.append(await self.interrupt(slots, steps))
        began = self._clock()
        await self._update(1)
        result.updates.append(self._clock() - began)
        # Half as many groups again as fit: the slots are full at first, and less and less full at the end.
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
        """Count what comes, until every sample has `enough` tokens."""
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
        """Decode `batch` samples side by side until each has `steps` tokens more than any had when all had started.

        Their prompts have 8 to `prompt` tokens, evenly spread.
        """
        lengths = _spread(prompt, batch)
        samples = [sample for length in lengths for sample in self._samples(1, length, self._budget(prompt))]
        tokens = {sample.id: 0 for sample in samples}
        for sample in samples:
            self._engine.submit(sample)
        await self._receive(tokens, 2)
        began, before = self._clock(), sum(tokens.values())
        await self._receive(tokens, max(tokens.values()) + steps)
        seconds, after = self._clock() - began, sum(tokens.values())
        await self._stop(samples)
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
        """`steps` steps of `groups` groups: responses around `median` tokens long, at most `longest`."""
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

    async def interrupt(self, batch: int, steps: int) -> float:
        """Seconds from an interrupt of `batch` samples to the last partial."""
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
