"""A run in virtual time: the scheduler of real runs on a simulated engine.

Invariant: the same arguments give the same outcome, to the last bit.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.batch import RolloutBatch, rate
from april.rollout.engine import Engine, KVPolicy
from april.rollout.episodes.episodes import Episodes
from april.rollout.params import RolloutParams
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.simulation.blank import BlankSample
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.turns import MOST_TURNS, Turns
from april.simulation.virtual_time import run
from april.simulation.workload import Workload

STREAMED = 64
"""Decode steps after which engines hand out tokens of running samples if generation overlaps with training. Servers do
the same, and estimates of an engine's speed need it."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Figures of one step. Times are virtual seconds."""

    version: int
    target: int
    seconds: float
    """Duration of `next_batch`, or of the whole step if generation overlaps with training."""
    training_seconds: float
    """Training time during which the engines were idle. With overlap, it and the update are part of `seconds`."""
    update_seconds: float
    consumed_tokens: int
    sampled_tokens: int
    occupancy: float
    buffered_tokens: int
    staleness: NDArray[np.int64]
    """Staleness of each group, shape [N]."""
    tokens_by_age: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Policy tokens of each consumed response, shape [N * G]."""
    truncated: int

    @classmethod
    def of(cls, step: RolloutBatch, training_seconds: float, update_seconds: float) -> StepRecord:
        samples = [sample for group in step.groups for sample in group.samples]
        lengths = np.array([sample.length - sample.environment_tokens for sample in samples])
        finishes = Counter([sample.finish for sample in samples])
        return cls(
            version=step.version,
            target=step.target,
            seconds=step.seconds,
            training_seconds=training_seconds,
            update_seconds=update_seconds,
            consumed_tokens=int(lengths.sum()),
            sampled_tokens=step.sampled_tokens,
            occupancy=step.occupancy,
            buffered_tokens=step.buffered_tokens,
            staleness=step.staleness,
            tokens_by_age=step.tokens_by_age,
            lengths=lengths,
            truncated=sum(count for finish, count in finishes.items() if finish is not None and finish.truncated),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A simulated run. Rates and means leave out the first `warm_up` steps, in which the buffer fills.

    Rates come in two kinds: over the rollout phase (`next_batch` and the weight update), and over everything.
    """

    steps: list[StepRecord]
    warm_up: int
    preemptions: int
    prefilled_tokens: int
    prefill_seconds: float
    """Seconds of prefill in all steps, added over the engines."""
    resumed_prefill_seconds: float
    """The part of `prefill_seconds` in which resumed responses were prefilled."""
    peak_kv: float
    """Largest share of its KV cache that any replica has used."""

    @property
    def counted(self) -> list[StepRecord]:
        return self.steps[self.warm_up :]

    @property
    def rollout_seconds(self) -> float:
        return sum(step.seconds + step.update_seconds for step in self.counted)

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + sum(step.training_seconds for step in self.counted)

    @property
    def consumed_tokens_per_second(self) -> float:
        """Consumed tokens per second of the rollout phase."""
        return rate(sum(step.consumed_tokens for step in self.counted), self.rollout_seconds)

    @property
    def generated_tokens_per_second(self) -> float:
        """Sampled tokens per second of the rollout phase."""
        return rate(sum(step.sampled_tokens for step in self.counted), self.rollout_seconds)

    @property
    def overall_tokens_per_second(self) -> float:
        """Consumed tokens per second of the whole time."""
        return rate(sum(step.consumed_tokens for step in self.counted), self.seconds)

    @property
    def occupancy(self) -> float:
        collecting = sum(step.seconds for step in self.counted)
        return rate(sum(step.occupancy * step.seconds for step in self.counted), collecting)

    @property
    def staleness(self) -> NDArray[np.int64]:
        """Staleness of every consumed group, shape [steps * N]."""
        return np.concatenate([step.staleness for step in self.counted])

    @property
    def mean_staleness(self) -> float:
        return float(self.staleness.mean())

    @property
    def max_staleness(self) -> int:
        return int(self.staleness.max())

    @property
    def off_policy_token_share(self) -> float:
        stale = sum(int(step.tokens_by_age[1:].sum()) for step in self.counted)
        return stale / sum(step.consumed_tokens for step in self.counted)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every consumed response."""
        return np.concatenate([step.lengths for step in self.counted])


def simulate(
    workload: Workload,
    cost: CostModel,
    *,
    replicas: int = 1,
    steps: int = 50,
    warm_up: int = 10,
    on_update: KVPolicy = "recompute",
    train_token_seconds: float = 0.0,
    overlap: bool = False,
    resolution: float = 0.0,
    dynamic_filter: Callable[[Group], bool] | None = None,
    turns: Turns | None = None,
    engine_type: type[SimulatedEngine] = SimulatedEngine,
    seed: int = 0,
    **params: Any,
) -> Outcome:
    """Collect `steps` steps and train on them, in virtual time.

    Args:
        workload: response lengths, N, G and the response budget.
        cost: costs of one engine.
        replicas: number of engines.
        warm_up: steps that rates and means leave out.
        on_update: treatment of the KV cache of unfinished samples at a weight update.
        train_token_seconds: training time for each consumed token.
        overlap: whether generation overlaps with training; without it, engines are idle during training.
        resolution: see `SimulatedEngine`.
        dynamic_filter: see `RolloutScheduler`.
        turns: turns of episodes, and the time of their environments; None if responses are no episodes.
        engine_type: class of the engine, to instrument it.
        seed: seed of the samples.
        params: fields of `RolloutParams`; N and G default to the workload's.
    """
    if not 0 <= warm_up < steps:
        raise ValueError(f"warm_up = {warm_up}: must leave at least one of steps = {steps}")
    streamed = STREAMED * cost.decode_seconds[-1] if overlap else None
    engine = engine_type(cost, workload, replicas, on_update, resolution, streamed, turns)
    episodes = None if turns is None else turns.episodes(engine.replicas.ended, engine.room)
    prompts = workload.prompts()
    scheduler = scheduler_of(
        engine, workload, prompts, params, seed, dynamic_filter, episodes, overlap, sample_type=BlankSample
    )
    with _without_garbage_collection():
        collecting = (_overlap if overlap else _alternate)(scheduler, steps, train_token_seconds)
        records = run(collecting)
    totals = engine.replicas
    return Outcome(
        records,
        warm_up,
        preemptions=totals.preemptions,
        prefilled_tokens=totals.prefilled_tokens,
        prefill_seconds=totals.prefill_seconds,
        resumed_prefill_seconds=totals.resumed_prefill_seconds,
        peak_kv=totals.peak_kv,
    )


def scheduler_of(
    engine: Engine,
    workload: Workload,
    prompts: Iterable[Prompt],
    own: Mapping[str, Any],
    seed: int,
    dynamic_filter: Callable[[Group], bool] | None = None,
    episodes: Episodes | None = None,
    overlap: bool = False,
    sample_type: type[Sample] = Sample,
) -> RolloutScheduler:
    """Return a scheduler for `workload`; the parameters in `own` take precedence."""
    size, group_size = workload.rollout_batch_size, workload.n_samples_per_prompt
    return RolloutScheduler(
        engine,
        prompts,
        no_reward,
        RolloutParams(**{"rollout_batch_size": size, "n_samples_per_prompt": group_size, **own}),
        sampling=SamplingParams(max_tokens=workload.max_tokens, max_turns=0 if episodes is None else MOST_TURNS),
        reward_scope="group",
        dynamic_filter=dynamic_filter,
        seed=seed,
        episodes=episodes,
        overlap=overlap,
        sample_type=sample_type,
    )


async def no_reward(prompt: Prompt, samples: Any) -> list[float]:
    """Return rewards of 0, as nothing is learned from simulated tokens."""
    return [0.0] * len(samples)


async def _alternate(scheduler: RolloutScheduler, steps: int, train_token_seconds: float) -> list[StepRecord]:
    loop = asyncio.get_running_loop()
    records = []
    async with scheduler:
        for _ in range(steps):
            step = await scheduler.next_batch()
            training = step.consumed_tokens * train_token_seconds if train_token_seconds else 0.0
            await asyncio.sleep(training)
            before = loop.time()
            await scheduler.update_weights()
            records.append(StepRecord.of(step, training, loop.time() - before))
    return records


async def _overlap(scheduler: RolloutScheduler, steps: int, train_token_seconds: float) -> list[StepRecord]:
    records = []
    async with scheduler:
        for _ in range(steps):
            step = await scheduler.next_batch()
            records.append(StepRecord.of(step, 0.0, 0.0))
            await asyncio.sleep(step.consumed_tokens * train_token_seconds)
            await scheduler.update_weights()
    return records


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: scanning the million objects of a large run would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
