"""Outages, samples that fail, and samples that crash the engine are distinguished, and no sampled token is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Capacity, EngineError, Prompt, RolloutBatch, RolloutScheduler, Sample, SamplingParams, StreamEngine
from april.engines.stream_engine import Tokens
from april.rollout.generation.engine_health import EngineHealth, EngineState
from april.rollout.generation.in_flight import SharedEngine
from april.simulation.virtual_time import run
from tests.scheduling import scheduler_of

TOKENS = 20
BUDGET = SamplingParams(max_tokens=TOKENS)


class FaultyServer(StreamEngine):
    """One server, in virtual time: 0.05 s a token.

    Args:
        outages: (begin, end) in seconds: all requests fail, those in flight and those that come.
        bad: groups whose requests fail at their token `at`.
        killers: samples that take the server down for `restart` seconds at their token `at`, after `drawn` tokens of
            their request.
    """

    def __init__(
        self,
        outages: Sequence[tuple[float, float]] = (),
        bad: Sequence[int] = (),
        killers: Sequence[str] = (),
        at: int = 0,
        restart: float = 3.0,
        slots: int = 64,
        drawn: int = 0,
    ) -> None:
        super().__init__(self._answer, Capacity(slots, 1000))
        self.outages = list(outages)
        self.bad = set(bad)
        self.killers = set(killers)
        self.at = at
        self.restart = restart
        self.drawn_before = drawn
        self.deaths = 0
        self.drawn: dict[str, int] = {}

    def require(self, began: float) -> None:
        now = asyncio.get_running_loop().time()
        if any(began < end and begin <= now for begin, end in self.outages):
            raise ConnectionError("503 of the load balancer")

    async def _answer(self, sample: Sample) -> AsyncIterator[Tokens]:
        began = asyncio.get_running_loop().time()
        for index in range(sample.length, TOKENS):
            self.require(began)
            if sample.group_id in self.bad and index >= self.at:
                raise RuntimeError("HTTP 500")
            if sample.id in self.killers and index >= self.at and index - sample.length >= self.drawn_before:
                now = asyncio.get_running_loop().time()
                self.deaths += 1
                self.outages.append((now, now + self.restart))
                raise ConnectionError("the server died")
            await asyncio.sleep(0.05)
            self.require(began)
            self.drawn[sample.id] = self.drawn.get(sample.id, 0) + 1
            yield [index], [-0.5]


def scheduler(engine: StreamEngine, **own: Any) -> RolloutScheduler:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    prompts: Iterator[Prompt] = (Prompt((1, 2, i), f"prompt {i}") for i in itertools.count())
    defaults = {"rollout_batch_size": 4, "over_sampling_batch_size": 8, "n_samples_per_prompt": 2, "sampling": BUDGET}
    return scheduler_of(engine, prompts, score, **{**defaults, **own})


def check(engine: FaultyServer, rollouts: RolloutScheduler, steps: Sequence[RolloutBatch]) -> set[int]:
    """Each token that was drawn is in its sample; returns the groups that were rejected."""
    kept = [group for step in steps for group in step.groups] + list(rollouts.buffer)
    rejected = set(range(rollouts.buffer.admitted)) - {group.id for group in kept}
    for sample in (sample for group in kept for sample in group.samples):
        assert sample.response_ids == list(range(sample.length)), "it went on from its last token"
        assert engine.drawn.get(sample.id, 0) == sample.length
    assert all(len(step.groups) == len(steps[0].groups) for step in steps)
    return rejected


async def steps_of(rollouts: RolloutScheduler, count: int = 3) -> list[RolloutBatch]:
    steps = []
    async with rollouts:
        for _ in range(count):
            steps.append(await rollouts.next_batch())
            await rollouts.update_weights()
    return steps


@pytest.mark.parametrize("max_retries", [0, 3])
@pytest.mark.parametrize("seconds", [0.2, 5.0, 300.0])
def test_an_outage_rejects_no_sample_and_all_samples_resume_from_their_last_token(
    seconds: float, max_retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FaultyServer(outages=[(0.33, 0.33 + seconds)])
    rollouts = scheduler(engine, max_retries=max_retries)
    with caplog.at_level(logging.WARNING, "april"):
        steps = run(steps_of(rollouts))
    assert check(engine, rollouts, steps) == set()
    assert not any(step.quarantined for step in steps)
    assert any(step.failures for step in steps)
    told = [record.getMessage() for record in caplog.records]
    if seconds < 2:
        assert told == []
    else:
        assert "503 of the load balancer; 16 samples wait with every token kept; trying again for at most" in told[0]
        assert told[-1].startswith("the engine answers again after")
        assert len(told) < 10


@pytest.mark.parametrize("outage_limit", [1.0, 40.0])
def test_at_the_outage_limit_the_step_fails_without_rejections_and_can_be_repeated(outage_limit: float) -> None:
    engine = FaultyServer(outages=[(0.33, 1e9)])
    rollouts = scheduler(engine, outage_limit=outage_limit)

    async def main() -> RolloutBatch:
        loop = asyncio.get_running_loop()
        async with rollouts:
            for _ in range(2):
                began = loop.time()
                with pytest.raises(EngineError, match=r"answered no request for \d+ s \(outage_limit = .*503 of the"):
                    await rollouts.next_batch()
                assert outage_limit - 0.01 < loop.time() - began < outage_limit + 1
                assert not rollouts.in_flight
            engine.outages.clear()
            return await rollouts.next_batch()

    step = run(main())
    assert check(engine, rollouts, [step]) == set()
    assert not step.quarantined


def test_a_bad_sample_that_remains_alone_is_quarantined_without_a_wait() -> None:
    """Its group is the last of a synchronous step: a control request shows that the engine works."""
    engine = FaultyServer(bad=[2], at=TOKENS - 1)
    rollouts = scheduler(engine, over_sampling_batch_size=4, max_staleness=0)
    steps = run(steps_of(rollouts, 2))
    assert check(engine, rollouts, steps) == {2}
    (quarantine,) = [one for step in steps for one in step.quarantined]
    assert quarantine.group_id == 2
    assert "HTTP 500" in quarantine.error


@pytest.mark.parametrize(("at", "drawn"), [(0, 0), (7, 0), (0, 1)])
@pytest.mark.parametrize("restart", [0.01, 4.0])
def test_a_sample_that_crashes_the_engine_is_found_by_bisection_and_quarantined(
    at: int, drawn: int, restart: float
) -> None:
    engine = FaultyServer(killers=["3.1"], at=at, restart=restart, drawn=drawn)
    rollouts = scheduler(engine, max_retries=1)
    steps = run(steps_of(rollouts))
    assert check(engine, rollouts, steps) == {3}
    (quarantine,) = [one for step in steps for one in step.quarantined]
    assert "the engine went down 2 times with this sample as the only suspect" in quarantine.error
    assert engine.deaths <= 9, "log2(16) halves, and two deaths alone"


def test_two_samples_that_take_the_engine_down_are_both_found() -> None:
    engine = FaultyServer(killers=["1.0", "6.1"])
    rollouts = scheduler(engine, max_retries=1, rollout_batch_size=6)
    steps = run(steps_of(rollouts, 2))
    assert check(engine, rollouts, steps) == {1, 6}


def test_an_evaluation_waits_for_the_end_of_an_outage() -> None:
    engine = FaultyServer(outages=[(0.1, 8.0)])
    rollouts = scheduler(engine)

    async def main() -> None:
        async with rollouts:
            groups = await rollouts.evaluate([Prompt((7, i)) for i in range(3)], 2)
            assert all(group.complete for group in groups)
            assert not rollouts.in_flight

    run(main())


def test_overlapped_generation_survives_an_outage_up_to_the_limit() -> None:
    engine = FaultyServer(outages=[(0.33, 9.0)])
    rollouts = scheduler(engine, max_staleness=3, overlap=True)

    async def main() -> list[RolloutBatch]:
        steps = []
        async with rollouts:
            for _ in range(3):
                steps.append(await rollouts.next_batch())
                await asyncio.sleep(0.5)
                await rollouts.update_weights()
        return steps

    assert check(engine, rollouts, run(main())) == set()


TIMES = st.floats(0.0, 8.0)


@given(
    outages=st.lists(st.tuples(TIMES, st.floats(0.01, 20.0)), max_size=3),
    bad=st.sets(st.integers(0, 9), max_size=2),
    killers=st.sets(st.sampled_from([f"{g}.{i}" for g in range(10) for i in range(2)]), max_size=2),
    at=st.integers(0, TOKENS - 1),
    restart=st.sampled_from([0.01, 0.4, 6.0]),
    slots=st.sampled_from([3, 64]),
    size=st.integers(5, 7),
    extra=st.integers(0, 7),
)
@settings(max_examples=30, deadline=None)
def test_only_bad_samples_are_quarantined_and_no_step_waits_for_them(
    outages: list[tuple[float, float]],
    bad: set[int],
    killers: set[str],
    at: int,
    restart: float,
    slots: int,
    size: int,
    extra: int,
) -> None:
    intervals = [(begin, begin + seconds) for begin, seconds in outages]

    def attempt() -> tuple[set[int], list[list[int]]]:
        engine = FaultyServer(intervals, sorted(bad), sorted(killers), at, restart, slots)
        target = min(size + extra, 6 * size)
        # Each outage may be charged to one sample, and each killer may take others' trials down with it.
        limit = len(outages) + 2 * len(killers) + 2
        rollouts = scheduler(engine, rollout_batch_size=size, over_sampling_batch_size=target, max_retries=limit)
        steps = run(steps_of(rollouts, 4))
        return check(engine, rollouts, steps), [[group.id for group in step.groups] for step in steps]

    rejected, trained = attempt()
    assert rejected <= bad | {int(name.split(".")[0]) for name in killers}
    assert attempt() == (rejected, trained), "the same faults at the same times lead to the same steps"


def test_an_outage_that_a_step_begins_in_is_limited() -> None:
    """A control request of the step before is in flight as the step begins."""

    async def main() -> None:
        engine = FaultyServer(outages=[(0.0, 1000.0)])
        health, loop = EngineHealth(1.0, 100.0), asyncio.get_running_loop()
        await asyncio.sleep(10.0)
        health.ask(SharedEngine(engine), Prompt((1, 2)), BUDGET, 0)
        health.new_step()
        await health.wait()
        answer = health.answer(loop.time())
        assert answer is not None
        assert answer.error is not None
        assert health.state is EngineState.DOWN
        health.check(109.0, 1)
        with pytest.raises(EngineError, match="answered no request for 100 s"):
            health.check(110.0, 1)
        health.works()
        assert health.state is EngineState.WORKING

    run(main())
