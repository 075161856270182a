"""A workload on a real engine, as the counterpart of `simulate` in virtual time.

Invariant: both get the same samples: the same number of prompts with the same lengths, the same seeds, and so the same
response lengths. The tokens themselves are random.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from april.rollout.engine import Engine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.wrapped_engine import WrappedEngine
from april.simulation.run import Outcome, StepRecord, scheduler_of
from april.simulation.workload import Workload

Update = Callable[[int], Awaitable[None]]
"""Updates the engine to a policy version, as a training step would."""


class GivenLengths(WrappedEngine):
    """Limits each sample of `groups` to its length in the workload, by its token budget.

    All lengths are computed in advance, so that this wrapper adds almost no time to the measurement.
    """

    def __init__(self, engine: Engine, workload: Workload, groups: Iterable[Group], update: Update) -> None:
        super().__init__(engine)
        samples = [sample for group in groups for sample in group.samples]
        numbers, seeds = np.array([s.group_id for s in samples]), np.array([s.seed for s in samples], np.uint64)
        lengths = workload.lengths(numbers, seeds).tolist()
        self._sampling = {s.id: replace(s.sampling, max_tokens=n) for s, n in zip(samples, lengths, strict=True)}
        self._update = update

    def submit(self, sample: Sample) -> None:
        super().submit(replace(sample, sampling=self._sampling[sample.id]))

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self._update(version)


async def serve(
    engine: Engine,
    workload: Workload,
    update: Update,
    *,
    steps: int,
    warm_up: int = 0,
    vocabulary: int = 64,
    rng: np.random.Generator | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    **params: Any,
) -> Outcome:
    """Collect `steps` steps, with a weight update after each. Arguments as of `simulate`, but:

    Args:
        update: updates the engine to a version, counted from 0; called once before the first step.
        vocabulary: prompts are drawn from the token ids 2 to this.
        clock: seconds.
    """
    rng = rng or np.random.default_rng(0)
    count = steps * params.get("rollout_batch_size", workload.rollout_batch_size)
    # Groups that are still in flight after the last step need prompts too.
    count += params.get("over_sampling_batch_size", 0)
    prompts = [
        Prompt(tuple(rng.integers(2, vocabulary, len(prompt.token_ids)).tolist()), prompt.id)
        for prompt in itertools.islice(workload.prompts(), count)
    ]
    size = params.get("n_samples_per_prompt", workload.n_samples_per_prompt)
    sampling = SamplingParams(max_tokens=workload.max_tokens)
    groups = (Group.start(i, prompt, size, sampling, seed) for i, prompt in enumerate(prompts))
    given = GivenLengths(engine, workload, groups, update)
    records = []
    async with scheduler_of(given, workload, prompts, params, seed) as rollouts:
        await update(0)
        for _ in range(steps):
            began = clock()
            step = await rollouts.next_batch()
            collected = clock()
            await rollouts.update_weights()
            updated = clock()
            # `clock` may measure CPU time, whereas the scheduler's own seconds are the event loop's.
            records.append(replace(StepRecord.of(step, 0.0, updated - collected), seconds=collected - began))
    engine.forget()
    return Outcome(
        records,
        warm_up,
        preemptions=0,
        prefilled_tokens=0,
        prefill_seconds=0.0,
        resumed_prefill_seconds=0.0,
        peak_kv=0.0,
    )
