"""Overlap of generation and training: no token is lost and the bound holds for any order of batches, updates and
faults."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import EngineError, Prompt, RewardError, RolloutBatch, RolloutScheduler, Sample, StalenessError
from april.rollout.events import Chunk
from april.rollout.journal.journal import Journal
from tests.journals import cut, last_events
from tests.limits import HANG
from tests.rollout.test_journal import build as journalled
from tests.rollout.test_journal import content
from tests.rollout.test_scheduler import SETTINGS, Counted, build, check_conservation, scheduler
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine, response

PATIENCE = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=8, max_size=8)
"""For each step: moments of training, and whether another step is taken before the weights are updated (below 3)."""


async def passing(moments: int) -> None:
    for _ in range(moments):
        await asyncio.sleep(0)


async def overlapped(rollouts: RolloutScheduler, schedule: list[tuple[int, int]]) -> list[RolloutBatch]:
    """Take a batch for each entry of `schedule`; two are in training together if the entry requests it and the bound
    allows it."""
    steps = []
    async with rollouts:
        for moments, again in schedule:
            try:
                steps.append(await rollouts.next_batch())
            except StalenessError:
                assert rollouts.trainer_version > rollouts.engine_version, (
                    "the bound always allows one more after an update"
                )
                await rollouts.update_weights()
                steps.append(await rollouts.next_batch())
            await passing(moments)
            while rollouts.trainer_version > rollouts.engine_version + (again < 3):
                await rollouts.update_weights()
    return steps


@given(SETTINGS, PATIENCE)
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_and_no_token_is_lost_for_any_order_of_batches_and_updates(
    s: dict[str, object], schedule: list[tuple[int, int]]
) -> None:
    engine, rollouts = build(s, overlap=True)
    steps = asyncio.run(overlapped(rollouts, schedule))
    check_conservation(s, engine, rollouts, steps)
    assert [step.version for step in steps] == list(range(8)), "a step is for the policy that trains on it"
    if s["max_staleness"] is not None:
        assert max(step.staleness.max() for step in steps) <= s["max_staleness"]
    requests = {
        (span.sample_id, span.before): span
        for step in steps
        for span in step.request_intervals
        if span.after > span.before
    }
    for step in steps:
        for sample in (sample for group in step.groups for sample in group.samples):
            place = 0
            while place < sample.length:  # each request continues where the previous one ended
                place = requests[sample.id, place].after


@given(SETTINGS, st.integers(0, 120), st.integers(0, 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_cancelled_call_loses_no_token(s: dict[str, object], moments: int, training: int, swap: bool) -> None:
    engine, rollouts = build(s, overlap=True)

    async def main() -> list[RolloutBatch]:
        async with rollouts:
            steps = [await rollouts.next_batch()]
            await passing(training)
            task: asyncio.Task[Any] = asyncio.create_task(rollouts.update_weights() if swap else rollouts.next_batch())
            await passing(moments)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None and not swap:
                steps.append(task.result())
            while rollouts.trainer_version > rollouts.engine_version:
                await rollouts.update_weights()
            for _ in range(3):
                steps.append(await rollouts.next_batch())
                await rollouts.update_weights()
        return steps

    steps = asyncio.run(main())
    check_conservation(s, engine, rollouts, steps)
    if s["max_staleness"] is not None:
        assert max(step.staleness.max() for step in steps) <= s["max_staleness"]


async def test_generation_continues_during_training_and_not_after_the_last_batch() -> None:
    engine = ScriptedEngine(slots=2)
    async with scheduler(engine, over_sampling_batch_size=12, max_staleness=4, overlap=True) as rollouts:
        await rollouts.next_batch()
        before = rollouts.buffer.sampled_tokens
        await passing(10)
        assert rollouts.buffer.sampled_tokens > before
        assert rollouts.in_flight
        assert (rollouts.engine_version, rollouts.trainer_version) == (0, 1)
        await rollouts.update_weights()
        assert (rollouts.engine_version, rollouts.trainer_version) == (1, 1)
        await passing(3)
        step = await rollouts.next_batch(last=True)
        assert step.version == 1
        assert not rollouts.in_flight
        before = rollouts.buffer.sampled_tokens
        await passing(10)
        assert rollouts.buffer.sampled_tokens == before


async def test_a_group_begins_whenever_one_is_ready_while_the_trainer_waits() -> None:
    engine = ScriptedEngine(slots=100)
    async with scheduler(engine, over_sampling_batch_size=6, max_staleness=8, overlap=True) as rollouts:
        for _ in range(6):
            before, ready = rollouts.buffer.admitted, len(rollouts.state.ready)
            await rollouts.next_batch()
            assert ready < 3, "the trainer had to wait"
            assert rollouts.buffer.admitted > max(before, 6), "groups began in the step"
            assert len(rollouts.buffer) - len(rollouts.state.ready) <= 6, "N' groups are in flight"
            await rollouts.update_weights()


async def test_no_group_begins_early_if_training_is_slower_than_generation() -> None:
    engine = ScriptedEngine(slots=100)
    async with scheduler(engine, over_sampling_batch_size=6, max_staleness=8, overlap=True) as rollouts:
        await rollouts.next_batch()
        for step in range(6):
            await passing(1000)
            assert len(rollouts.buffer) == len(rollouts.state.ready), "every group is ready before training ends"
            assert len(rollouts.buffer) == (6 if step else 9), "in the first step the trainer had to wait"
            await rollouts.update_weights()
            await rollouts.next_batch()


@pytest.mark.parametrize("bound", [2, 8])
async def test_refill_starts_groups_in_turns_and_keeps_the_bound(bound: int) -> None:
    engine = ScriptedEngine(slots=100)
    async with scheduler(engine, over_sampling_batch_size=6, max_staleness=bound) as rollouts:
        rollouts.refill = True
        for _ in range(12):
            before, ready = len(rollouts.buffer), len(rollouts.state.ready)
            admitted = rollouts.buffer.admitted
            batch = await rollouts.next_batch()
            assert not rollouts.in_flight
            assert batch.staleness.max() <= bound
            begun = rollouts.buffer.admitted - admitted
            assert ready >= 3 or before + begun > 6 or bound == 2, "groups began in the step"
            assert len(rollouts.buffer) - len(rollouts.state.ready) <= 6
            assert before + begun <= 3 * (bound + 1)
            await rollouts.update_weights()


async def test_overlap_without_staleness_is_synchronous() -> None:
    engine = ScriptedEngine()
    async with scheduler(engine, over_sampling_batch_size=3, max_staleness=0, overlap=True) as rollouts:
        for _ in range(4):
            step = await rollouts.next_batch()
            assert step.off_policy_token_share == 0
            await passing(20)
            assert not len(rollouts.buffer)
            with pytest.raises(StalenessError, match="update the weights before the next batch"):
                await rollouts.next_batch()
            await rollouts.update_weights()


async def test_an_error_during_training_is_raised_by_the_next_batch_and_not_by_the_update() -> None:
    engine = ScriptedEngine()
    bad = {"on": False}

    async def score(prompt: Prompt, sample: Sample) -> float:
        if bad["on"]:
            raise ValueError("no such key")
        return 1.0

    async with scheduler(engine, reward=score, overlap=True, seed=1) as rollouts:
        await rollouts.next_batch()
        bad["on"] = True
        await passing(200)
        await rollouts.update_weights()
        assert (rollouts.engine_version, engine.version) == (1, 1)
        with pytest.raises(RewardError, match="no such key"):
            await rollouts.next_batch()
        assert not rollouts.in_flight
        bad["on"] = False
        assert len((await rollouts.next_batch()).groups) == 3
        await passing(3)
        engine.dead = True
        await passing(10)
        with pytest.raises(EngineError, match="was killed"):
            await rollouts.next_batch()
        engine.dead = False
        engine.flight.clear()
        await rollouts.update_weights()
        assert len((await rollouts.next_batch()).groups) == 3
    assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values()))


async def test_a_batch_has_the_seconds_of_training_during_its_generation() -> None:
    async with scheduler(ScriptedEngine(slots=20), max_staleness=3, overlap=True) as rollouts:
        first = await rollouts.next_batch()
        assert first.training_seconds == 0
        assert any(span.outcome == "running" for span in first.request_intervals)
        await asyncio.sleep(0.02)
        await rollouts.update_weights()
        step = await rollouts.next_batch()
    assert step.interrupted_at is not None
    assert step.resumed_at is not None
    assert step.update_seconds is not None
    assert 0.02 <= step.training_seconds == step.interrupted_at <= step.resumed_at <= step.seconds
    assert any(span.running for span in step.request_intervals)


async def test_updates_from_two_tasks_of_a_pause_follow_each_other() -> None:
    updates = []

    class Slow(ScriptedEngine):
        async def update_weights(self, version: int, weights: Any = None) -> None:
            updates.append(("began", version, weights))
            await passing(5)
            await super().update_weights(version, weights)
            updates.append(("ended", version, weights))

    async with scheduler(Slow(), max_staleness=3, overlap=True) as rollouts:
        for _ in range(2):
            await rollouts.next_batch()
        async with rollouts.pause():
            await asyncio.gather(rollouts.update_weights("a"), rollouts.update_weights("b"))
        assert updates == [("began", 1, "a"), ("ended", 1, "a"), ("began", 2, "b"), ("ended", 2, "b")]
        assert (rollouts.engine_version, rollouts.trainer_version) == (2, 2)
        with pytest.raises(ValueError, match="version 7 cannot follow 2"):
            await rollouts.update_weights(version=7)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_update_that_outlives_a_pause_changes_no_weights_under_samples(cancelled: bool) -> None:
    began, proceed = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def update_weights(self, version: int, weights: Any = None) -> None:
            began.set()
            await proceed.wait()
            await super().update_weights(version, weights)  # which asserts that nothing is in flight

    async with scheduler(Slow(), max_staleness=3, overlap=True) as rollouts:
        await rollouts.next_batch()

        tasks: list[asyncio.Task[Any]] = []

        async def pause() -> None:
            async with rollouts.pause():
                tasks.append(asyncio.create_task(rollouts.update_weights()))
                await began.wait()

        pausing = asyncio.create_task(pause())
        await began.wait()
        await passing(5)
        if cancelled:
            pausing.cancel()
            await passing(5)
            tasks += [asyncio.create_task(rollouts.next_batch()), asyncio.create_task(rollouts.update_weights())]
        await passing(20)
        proceed.set()
        await asyncio.wait([*tasks, pausing], timeout=HANG)
        assert [task.exception() for task in tasks] == [None] * len(tasks)
        assert pausing.cancelled() == cancelled
        assert rollouts.engine_version == (2 if cancelled else 1)
        assert not rollouts._paused


@given(SETTINGS, st.integers(1, 4), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_a_state_saved_after_an_update_continues_unchanged(
    s: dict[str, object], stop_after: int, training: int
) -> None:
    s = {**s, "auto": False}
    engine, rollouts = build(s, prompts=Counted(), overlap=True)

    async def before() -> tuple[list[RolloutBatch], dict[str, Any]]:
        steps = []
        async with rollouts:
            for _ in range(stop_after):
                steps.append(await rollouts.next_batch())
                await passing(training)
                async with rollouts.pause():
                    await rollouts.update_weights()
                    state = json.loads(json.dumps(rollouts.state_dict()))
                    saved.update(engine.ledger)
                    saved.update({id: list(tokens) for id, tokens in engine.ledger.items()})
        return steps, state

    saved: dict[str, list[int]] = {}
    steps, state = asyncio.run(before())
    revived, again = build(s, prompts=Counted(), overlap=True)
    revived.rng.seed(99)
    revived.ledger, revived.version = saved, stop_after
    again.load_state_dict(state)
    steps += asyncio.run(overlapped(again, [(training, 9)] * 4))
    check_conservation(s, revived, again, steps)
    if s["max_staleness"] is not None:
        assert max(step.staleness.max() for step in steps) <= s["max_staleness"]


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05]), st.booleans(), st.floats(0, 1), st.integers(0, 30))
@settings(max_examples=15, deadline=None)
def test_a_run_that_dies_at_any_event_resumes_with_the_same_groups(
    seed: int, failure_rate: float, filtered: bool, where: float, training: int
) -> None:
    """Every batch is returned again unchanged, with `overlap` and, for a run that overlaps no longer, without it."""
    schedule = [(training, 9)] * 5
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        with closing(Journal(path, flush_seconds=0)) as journal:
            before = asyncio.run(overlapped(journalled(journal, seed, failure_rate, filtered, True), schedule))
        records = [0, *last_events(path)]
        cut(path, records[round(where * (len(records) - 1))])

        with closing(Journal(path, flush_seconds=0)) as journal:
            survived = journalled(journal, seed, failure_rate, filtered).state
            everything: dict[str, list[int]] = {}
            for event in journal.replay():
                survived.apply(event)
                if isinstance(event, Chunk):
                    everything.setdefault(event.sample_id, []).extend(event.token_ids)
            journal.position = 0
            alternating = journalled(journal, seed, failure_rate, filtered)
            handed_over = survived.buffer.trained.groups // 2
            assert asyncio.run(replayed(alternating, handed_over)) == [content(step) for step in before[:handed_over]]
            journal.position = 0
            rollouts = journalled(journal, seed + 1, failure_rate, filtered, True)
            engine: Any = rollouts.engine
            engine.ledger = everything
            after = asyncio.run(overlapped(rollouts, schedule))

    assert [content(step) for step in after[:handed_over]] == [content(step) for step in before[:handed_over]]
    assert all(step.staleness.max() <= 2 for step in after)
    for group in [*(group for step in after for group in step.groups), *rollouts.buffer]:
        assert group.prompt.metadata["number"] == group.id, "prompts are consumed once each, in order"
        for sample in group.samples:
            assert sample.response_ids == engine.ledger.get(sample.id, [])
            assert sample.response_ids == response(sample.seed, 30)[: sample.length]
    assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values()))


async def test_generation_continues_during_the_repeated_training_of_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path, flush_seconds=0)) as journal:
        rollouts = journalled(journal, overlap=True)
        async with rollouts:
            before = [await rollouts.next_batch()]
            await rollouts.update_weights()
            before.append(await rollouts.next_batch())
            await passing(5)
        ledger = rollouts.engine.ledger  # type: ignore[attr-defined]
    with closing(Journal(path, flush_seconds=0)) as journal:
        resumed = journalled(journal, 1, overlap=True)
        resumed.engine.ledger = ledger  # type: ignore[attr-defined]
        async with resumed:
            again = [await resumed.next_batch()]
            assert not resumed.in_flight, "the journal continues with the weight update"
            await resumed.update_weights()
            again.append(await resumed.next_batch())
            sampled = resumed.buffer.sampled_tokens
            await passing(10)
            assert resumed.buffer.sampled_tokens > sampled
            await resumed.update_weights()
            assert (await resumed.next_batch()).version == 2
    assert list(map(content, again)) == list(map(content, before))


async def replayed(rollouts: RolloutScheduler, steps: int) -> list[dict[str, Any]]:
    collected = []
    for number in range(steps):
        collected.append(content(await rollouts.next_batch()))
        if number < steps - 1:
            await rollouts.update_weights()
    return collected


class Late(ScriptedEngine):
    """Returns after an update tokens sampled before it, like a server that freezes requests during the update."""

    frozen: dict[str, int] = {}  # noqa: RUF012

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        chunks = await super().interrupt(sample_ids)
        self.frozen = {id: self.version for id, token_ids in self.ledger.items() if token_ids}
        return chunks

    async def poll(self) -> list[Chunk]:
        late = [self.serve(id, 1)._replace(version=v) for id, v in self.frozen.items() if id in self.flight]
        self.frozen = {}
        return late or await super().poll()


@pytest.mark.parametrize("overlap", [False, True])
async def test_tokens_sampled_before_an_update_may_arrive_after_it(overlap: bool) -> None:
    rollouts = scheduler_of(
        Late(),
        (Prompt((1, 2), str(i)) for i in itertools.count()),
        lambda prompt, sample: 0.0,
        rollout_batch_size=2,
        over_sampling_batch_size=6,
        n_samples_per_prompt=3,
        max_staleness=3,
        overlap=overlap,
    )
    mixed = 0
    async with rollouts:
        for _ in range(6):
            step = await rollouts.next_batch()
            for sample in (sample for group in step.groups for sample in group.samples):
                assert sample.response_ids == response(sample.seed, sample.sampling.max_tokens)
                mixed += len(sample.segments) > 1
            assert step.staleness.max() <= 3
            await rollouts.update_weights()
    assert mixed


async def test_chunks_of_a_cancelled_wait_are_kept_if_the_interrupt_fails() -> None:
    engine = ScriptedEngine()
    prompts = (Prompt((1, 2), str(i)) for i in itertools.count())
    rollouts = scheduler_of(engine, prompts, lambda prompt, sample: 0.0, rollout_batch_size=2, n_samples_per_prompt=3)
    async with rollouts:
        loop = rollouts._loop
        loop.start_step()
        loop.fill()
        loop.generation.in_flight.deliver([engine.serve("0.0", 1)])  # as a cancelled `poll` leaves it
        engine.dead = True
        with pytest.raises(EngineError):
            await loop.generation.interrupt()
        engine.dead = False
        engine.flight.clear()
        step = await rollouts.next_batch()
        for sample in (sample for group in step.groups for sample in group.samples):
            assert sample.response_ids == response(sample.seed, sample.sampling.max_tokens)
