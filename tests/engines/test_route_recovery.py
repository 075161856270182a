"""Routes under a scheduler with interrupts, weight updates, lost requests and crashes, against plain forward passes."""

from __future__ import annotations

import asyncio
import copy
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Chunk, FaultSettings, Prompt, RolloutParams, RolloutScheduler, Sample, SamplingParams
from april.engines.pool import EnginePool
from april.rollout.engine import Fault, KVPolicy
from april.rollout.journal.journal import Journal
from april.rollout.trajectory.routes import RouterReplay
from april.rollout.wrapped_engine import WrappedEngine
from tests.engines.architectures import perturb
from tests.engines.computed_routes import CachedBy, CacheLog, computed_routes
from tests.engines.test_routes import POLICY, engine, tokens
from tests.journals import cut, last_events
from tests.mixtures import as_sets

STEPS, BUDGET = 3, 14


class Case(NamedTuple):
    replay: RouterReplay
    on_update: KVPolicy
    rate: float
    """Probability that a request is lost at a chunk."""
    replicas: int


class Arrival(NamedTuple):
    """Tokens of a chunk; its routes may be lost."""

    count: int
    version: int
    rows: dict[int, CachedBy] | None
    """By place, the versions that computed the cache at the row; None if the rows are lost."""


class Arrivals:
    """Chunks of a process, by sample."""

    def __init__(self) -> None:
        self.of: dict[str, list[Arrival]] = defaultdict(list)
        self.replayed: dict[str, int] = {}
        """Tokens that a sample has when it is first submitted."""

    def before(self, sample: Sample, earlier: Arrivals | None) -> list[Arrival]:
        """Return the arrivals of a sample, of an earlier process up to the crash."""
        kept, missing = list[Arrival](), self.replayed.get(sample.id, sample.length)
        for arrival in earlier.of[sample.id] if earlier is not None else ():
            if missing > 0:
                kept.append(arrival)
                missing -= arrival.count
        assert missing == 0
        return [*kept, *self.of[sample.id]]


class LosingEngine(WrappedEngine):
    """Loses requests: their tokens have arrived, and their routes have not, as when a server dies."""

    def __init__(self, policy: Any, case: Case, seed: int, arrivals: Arrivals) -> None:
        embedded = engine(policy, case.replay, on_update=case.on_update, max_num_seqs=6, prefill_chunk=9)
        super().__init__(embedded)
        self.on_update = case.on_update
        self._random, self._rate = random.Random(seed), case.rate
        self._arrivals, self._log = arrivals, CacheLog(embedded)

    def submit(self, sample: Sample) -> None:
        self._arrivals.replayed.setdefault(sample.id, sample.length)
        super().submit(sample)

    async def poll(self) -> list[Chunk]:
        given_out = []
        for chunk in await super().poll():
            if chunk.finish is not None or self._random.random() >= self._rate:
                given_out += self._noted([chunk])
                continue
            await self.engine.interrupt([chunk.sample_id])
            self.engine.forget([chunk.sample_id])
            given_out += self._noted([chunk._replace(routes=None)])
            given_out.append(Chunk(chunk.sample_id, (), (), chunk.version, error="its server died", fault=Fault.LOST))
        return given_out

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        return self._noted(await super().interrupt(sample_ids))

    def _noted(self, chunks: list[Chunk]) -> list[Chunk]:
        for chunk in chunks:
            cached, routes = self._log.newest[chunk.sample_id], chunk.routes
            rows = None if routes is None else dict.fromkeys(range(routes.start, routes.end), cached)
            self._arrivals.of[chunk.sample_id].append(Arrival(len(chunk.token_ids), chunk.version, rows))
        return chunks


async def collect(case: Case, journal: Journal, seed: int) -> tuple[list[Sample], Arrivals]:
    """Return the samples of all steps, trained or buffered, and what has arrived of them.

    With replicas, a pool resumes lost samples on any of them, and keeps groups together otherwise.
    """
    policy, arrivals = copy.deepcopy(POLICY), Arrivals()
    losing = [LosingEngine(policy, case, seed + replica, arrivals) for replica in range(case.replicas)]
    rollouts = RolloutScheduler(
        losing[0] if case.replicas == 1 else EnginePool(losing),
        (Prompt((2 + i % 40, 3, 4 + i % 7), str(i)) for i in range(1000)),
        lambda prompt, sample: 0.0,
        RolloutParams(
            rollout_batch_size=2,
            over_sampling_batch_size=4,
            n_samples_per_prompt=2,
            max_staleness=2,
            latest_routes=case.replay == "latest",
        ),
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
    return [*samples, *rollouts.buffer.samples], arrivals


@pytest.mark.parametrize("replay", ["recorded", "latest"])
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.1, 0.0]), st.floats(0, 1), st.integers(1, 2))
def test_exactly_the_lost_rows_are_unknown_and_all_others_are_what_was_computed(
    replay: RouterReplay, on_update: KVPolicy, seed: int, rate: float, where: float, replicas: int
) -> None:
    versions, case = [copy.deepcopy(POLICY)], Case(replay, on_update, rate, replicas)
    for version in range(1, STEPS + 1):
        versions.append(copy.deepcopy(versions[-1]))
        perturb(versions[-1], version)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        with closing(Journal(path, flush_seconds=0)) as journal:
            samples, arrivals = asyncio.run(collect(case, journal, seed))
        for sample in samples:
            _check(sample, versions, case, arrivals.before(sample, None))
        records = [0, *last_events(path)]
        cut(path, records[round(where * (len(records) - 1))])
        with closing(Journal(path, flush_seconds=0)) as journal:
            samples, resumed = asyncio.run(collect(case, journal, seed + 1))
        for sample in samples:
            _check(sample, versions, case, resumed.before(sample, arrivals))


def _check(sample: Sample, versions: list[Any], case: Case, arrived: list[Arrival]) -> None:
    prompt, end, latest = len(sample.prompt_ids), len(sample.prompt_ids), case.replay == "latest"
    lost, held, drawn_by, of = set[int](), dict[int, CachedBy](), dict[int, int](), dict[int, int]()
    for count, version, rows in arrived:
        consumed = end - 1 if drawn_by else 0
        drawn_by |= dict.fromkeys(range(end, end + count), version)
        end += count
        own = {place for place in range(end - 1) if latest or drawn_by.get(place + 1, version) == version}
        # A request supplies all rows that its sample lacks, and a row is taken from the version that drew its token.
        lost = lost | {*range(consumed, end - 1)} if rows is None else lost - own
        for place in own & (rows or {}).keys():
            if latest or place not in held:
                held[place], of[place] = (rows or {})[place], version
    if not sample.length:
        return
    assert end == prompt + sample.length
    known = np.zeros(end - 1, bool)
    if sample.routes is not None:
        known[: sample.routes.length] = sample.routes.known
    assert {*np.flatnonzero(~known).tolist()} == lost
    assert sample.missing_routes == len(lost)
    expected: dict[int, Any] = {}
    for place in np.flatnonzero(known).tolist():
        assert sample.routes is not None
        cached = held[place]
        if case.on_update == "recompute":
            assert {*cached[: place + 1]} == {of[place]}
        if id(cached) not in expected:
            expected[id(cached)] = as_sets(computed_routes(versions, tokens(sample)[:-1], cached))
        np.testing.assert_array_equal(as_sets(sample.routes.experts[place]), expected[id(cached)][place])
