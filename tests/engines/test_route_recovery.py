"""Routes under a scheduler with interrupts, weight updates, lost requests and crashes, against plain forward passes."""

from __future__ import annotations

import asyncio
import copy
import random
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Chunk, FaultSettings, Prompt, RolloutParams, RolloutScheduler, Sample, SamplingParams
from april.engines.pool import EnginePool
from april.rollout.engine import Fault
from april.rollout.journal.journal import Journal
from april.rollout.wrapped_engine import WrappedEngine
from tests.engines.architectures import perturb
from tests.engines.test_routes import POLICY, engine, tokens
from tests.journals import cut, last_events
from tests.mixtures import as_sets, routes

STEPS, BUDGET = 3, 14


class LosingEngine(WrappedEngine):
    """Loses requests: their tokens have arrived, and their routes have not, as when a server dies."""

    def __init__(self, policy: Any, seed: int, rate: float) -> None:
        super().__init__(engine(policy, max_num_seqs=6, prefill_chunk=9))
        self._random, self._rate = random.Random(seed), rate
        self.lost = 0

    async def poll(self) -> list[Chunk]:
        given_out = []
        for chunk in await super().poll():
            if chunk.finish is not None or self._random.random() >= self._rate:
                given_out.append(chunk)
                continue
            await self.engine.interrupt([chunk.sample_id])
            self.engine.forget([chunk.sample_id])
            self.lost += chunk.routes is not None
            given_out.append(chunk._replace(routes=None))
            given_out.append(Chunk(chunk.sample_id, (), (), chunk.version, error="its server died", fault=Fault.LOST))
        return given_out


async def collect(policy: Any, journal: Journal, seed: int, rate: float, replicas: int) -> tuple[list[Sample], int]:
    """Return the samples of all steps, trained or buffered, and the number of chunks whose routes were lost.

    With replicas, a pool resumes lost samples on any of them, and keeps groups together otherwise.
    """
    losing = [LosingEngine(policy, seed + replica, rate) for replica in range(replicas)]
    rollouts = RolloutScheduler(
        losing[0] if replicas == 1 else EnginePool(losing),
        (Prompt((2 + i % 40, 3, 4 + i % 7), str(i)) for i in range(1000)),
        lambda prompt, sample: 0.0,
        RolloutParams(rollout_batch_size=2, over_sampling_batch_size=4, n_samples_per_prompt=2, max_staleness=2),
        sampling=SamplingParams(max_tokens=BUDGET, stop_token_ids=tuple(range(20, 26))),
        faults=FaultSettings(max_retries=50, retry_delay=0.0),
        journal=journal,
    )
    samples: list[Sample] = []
    async with rollouts:
        for version in range(1, STEPS + 1):
            samples += [sample for group in (await rollouts.next_batch()).groups for sample in group.samples]
            perturb(policy, version)
            await rollouts.update_weights()
    return [*samples, *rollouts.buffer.samples], sum(engine.lost for engine in losing)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.1]), st.floats(0, 1), st.integers(1, 2))
def test_known_rows_are_of_their_versions_and_lost_ones_are_unknown(
    seed: int, rate: float, where: float, replicas: int
) -> None:
    versions = [copy.deepcopy(POLICY)]
    for version in range(1, STEPS + 1):
        versions.append(copy.deepcopy(versions[-1]))
        perturb(versions[-1], version)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        with closing(Journal(path, flush_seconds=0)) as journal:
            samples, lost = asyncio.run(collect(copy.deepcopy(POLICY), journal, seed, rate, replicas))
        _check(samples, versions, lost)
        records = [0, *last_events(path)]
        cut(path, records[round(where * (len(records) - 1))])
        with closing(Journal(path, flush_seconds=0)) as journal:
            samples, again = asyncio.run(collect(copy.deepcopy(POLICY), journal, seed + 1, rate, replicas))
        _check(samples, versions, lost + again)


def _check(samples: list[Sample], versions: list[Any], lost: int) -> None:
    missing = 0
    for sample in samples:
        if not sample.length:
            continue
        if sample.routes is None:
            missing += sample.missing_routes
            continue
        found, known, start = as_sets(sample.routes.experts), sample.routes.known, len(sample.prompt_ids)
        for segment in sample.segments:
            expected = as_sets(routes(versions[segment.version], tokens(sample)))
            places = np.arange(start - 1, min(start + len(segment) - 1, len(known)))
            places = places[known[places]]
            np.testing.assert_array_equal(found[places], expected[places])
            start += len(segment)
        missing += sample.missing_routes
    assert (missing > 0) <= (lost > 0), "rows are missing only where routes were lost"
