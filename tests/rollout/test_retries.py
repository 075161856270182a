"""Failed requests: their samples resume from the last token after a back-off, or their groups are quarantined."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator

import pytest

from april import Chunk, EngineError, Fault, Prompt, RolloutScheduler, Sample, SamplingParams
from april.rollout.buffer import Rejection
from april.rollout.generation.engine_health import MAX_BACK_OFF, back_off
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine


class Cursed(ScriptedEngine):
    """Requests for the samples of some groups fail after the given tokens; the engine records forgotten samples."""

    def __init__(self, groups: Iterable[object], after: int = 0, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.cursed = set(map(str, groups))
        self.after = after
        self.forgotten: list[str] = []

    async def poll(self) -> list[Chunk]:
        chunks = []
        for id in list(self.flight):
            if id.rpartition(".")[0] in self.cursed and len(self.ledger.get(id, [])) >= self.after:
                del self.flight[id]
                chunks.append(Chunk(id, (), (), self.version, error=f"no luck with {id}"))
        return chunks + await super().poll()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        ids = list(sample_ids or ())
        self.forgotten += ids
        super().forget(ids)


def prompts() -> Iterator[Prompt]:
    return (Prompt((1, 2, i), f"prompt {i}") for i in itertools.count())


async def score(prompt: Prompt, sample: Sample) -> float:
    return 1.0


def scheduler(engine: ScriptedEngine, **settings: object) -> RolloutScheduler:
    defaults: dict[str, object] = {
        "over_sampling_batch_size": 6,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "sampling": SamplingParams(max_tokens=60),
        "retry_delay": 0.0,
    }
    return scheduler_of(engine, prompts(), **{"reward": score, **defaults, **settings})


def test_each_failure_in_a_row_doubles_the_wait() -> None:
    assert [back_off(0.5, row) for row in (1, 2, 3, 4, 5, 6, 7, 8, 5000)] == [0.5, 1, 2, 4, 8, 16, *[MAX_BACK_OFF] * 3]
    assert back_off(0.0, 5000) == 0


async def test_an_image_that_cannot_be_read_any_more_ends_generation_at_once() -> None:
    """No other attempt, and no engine, would bring it back."""

    class Blind(Cursed):
        async def poll(self) -> list[Chunk]:
            return [
                c if c.error is None else c._replace(error="image 1.png: gone", fault=Fault.INPUT)
                for c in await super().poll()
            ]

    engine = Blind([1], after=4, slots=100)
    async with scheduler(engine, retry_delay=30.0) as rollouts:
        with pytest.raises(EngineError, match=r"^image 1\.png: gone$"):
            await rollouts.next_batch()
    assert engine.submissions.count("1.0") == 1


async def test_a_token_between_two_failures_resets_the_failure_count() -> None:
    class Flaky(ScriptedEngine):
        """Each request of a sample of group 1 fails after its first tokens."""

        async def poll(self) -> list[Chunk]:
            chunks = await super().poll()
            failing = [chunk.sample_id for chunk in chunks if chunk.sample_id[:2] == "1." and chunk.finish is None]
            for id in failing:
                del self.flight[id]
            return chunks + [Chunk(id, (), (), self.version, error="no luck") for id in failing]

    async with scheduler(Flaky(slots=100), max_retries=1) as rollouts:
        steps = []
        for _ in range(3):
            steps.append(await rollouts.next_batch())
            await rollouts.update_weights()
    assert any(failure.sample_id.startswith("1.") for step in steps for failure in step.failures)
    assert not any(step.quarantined for step in steps)


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_group_that_keeps_failing_is_quarantined_with_its_reason_and_replaced(overlap: bool) -> None:
    engine = Cursed({1}, slots=100)
    rollouts = scheduler(engine, max_retries=2, overlap=overlap)
    async with rollouts:
        steps = []
        for _ in range(3):
            steps.append(await rollouts.next_batch())
            await rollouts.update_weights()
    quarantined = [q for step in steps for q in step.quarantined]
    assert [(q.group_id, q.prompt_id, q.reason) for q in quarantined] == [(1, "prompt 1", Rejection.ENGINE)]
    assert quarantined[0].error.startswith("no luck with 1.")
    assert [id for step in steps for id, _ in step.rejections] == [1]
    assert all(len(step.groups) == 3 for step in steps)
    assert 1 not in {group.id for step in steps for group in step.groups}
    attempts = max(engine.submissions.count(id) for id in ("1.0", "1.1"))
    assert attempts in (3, 4), "once, two more times, and with a new step, which does not wait for evidence"
    forgotten = {id for id in engine.forgotten if not id.startswith("control")}
    assert forgotten == {"1.0", "1.1"}, "the engine holds nothing for samples that never come back"


async def test_a_sample_that_the_engine_refuses_fails_alone() -> None:
    class Strict(ScriptedEngine):
        """Refuses the samples of group 1."""

        def submit(self, sample: Sample) -> None:
            if sample.group_id == 1:
                raise ValueError(f"sample {sample.id}: not at this temperature")
            super().submit(sample)

    async with scheduler(Strict(slots=100), max_retries=2) as rollouts:
        steps = []
        for _ in range(2):
            steps.append(await rollouts.next_batch())
            await rollouts.update_weights()
    quarantined = [q for step in steps for q in step.quarantined]
    assert [(q.group_id, q.reason) for q in quarantined] == [(1, Rejection.ENGINE)]
    assert quarantined[0].error.endswith("not at this temperature")
    assert all(len(step.groups) == 3 for step in steps)


async def test_a_back_off_of_one_sample_delays_no_other_sample() -> None:
    engine = Cursed({0}, slots=100)
    rollouts = scheduler(engine, retry_delay=1e9)
    async with rollouts:
        step = await rollouts.next_batch()
        assert len(step.groups) == 3
        assert not step.quarantined
        assert engine.submissions.count("0.0") == 1
        await rollouts.update_weights()
        await rollouts.next_batch()
        assert engine.submissions.count("0.0") == 2, "a new step does not wait"


async def test_a_failed_request_resumes_from_its_last_token() -> None:
    engine = Cursed({0, 1, 2, 3}, after=3, slots=100)
    rollouts = scheduler(engine, max_retries=1)
    async with rollouts:
        for _ in range(2):
            await rollouts.next_batch()
            await rollouts.update_weights()
    assert "4.0" in engine.ledger
    assert len(engine.submissions) > len(set(engine.submissions)), "submit asserts that it gets every token back"


async def test_an_abandoned_engine_loses_no_token_of_its_last_poll() -> None:
    engine = Cursed(range(1, 50), slots=100)
    rollouts = scheduler(engine, max_retries=0, over_sampling_batch_size=5)
    with pytest.raises(EngineError, match=r"keep failing; the last one, sample .*: no luck"):
        async with rollouts:
            await rollouts.next_batch()
    assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values())) > 0
    rollouts.buffer.check()


async def test_evaluation_counts_failures_the_same_way() -> None:
    engine = Cursed({"evaluation 0"}, slots=100)
    rollouts = scheduler(engine, max_retries=4)
    async with rollouts:
        with pytest.raises(EngineError, match=r"keep failing; the last one, sample evaluation 0\.0: no luck"):
            await rollouts.evaluate([Prompt((7,), "held out")])
    assert engine.submissions.count("evaluation 0.0") == 5


@pytest.mark.parametrize("settings", [{"max_retries": -1}, {"retry_delay": -0.1}, {"outage_limit": 0.0}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        scheduler(ScriptedEngine(), **settings)


async def test_cancelling_a_step_keeps_every_token() -> None:
    """A step that waits for tokens, verdicts and retries at once is cancelled at each of its first moments."""

    async def slow(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0)
        return 1.0

    for moments in range(1, 80):
        engine = ScriptedEngine(slots=100, failure_rate=0.2, seed=moments)
        rollouts = scheduler(engine, reward=slow, dynamic_filter=lambda group: group.id % 2 == 0, max_retries=100)
        async with rollouts:
            step = asyncio.create_task(rollouts.next_batch())
            for _ in range(moments):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values())), moments
            rollouts.buffer.check()
            assert len((await rollouts.next_batch()).groups) == 3


async def test_a_control_request_does_not_prevent_a_joint_interrupt() -> None:
    class AllOrNothing(Cursed):
        """As verl's replicas: it stops everything that is in flight, or nothing."""

        async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
            named = set(self.flight if sample_ids is None else sample_ids)
            if named & self.flight.keys() and not self.flight.keys() <= named:
                raise EngineError(f"samples in flight were not named: {self.flight.keys() - named}")
            return await super().interrupt(sample_ids)

    controls = 0
    for moments in range(80):
        engine = AllOrNothing({0, 1}, slots=2)
        async with scheduler(engine, max_staleness=3, over_sampling_batch_size=3, overlap=True) as rollouts:
            step = asyncio.create_task(rollouts.next_batch())
            for _ in range(moments):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            await rollouts.update_weights()
            assert len((await rollouts.next_batch()).groups) == 3
        controls += sum(id.startswith("control") for id in engine.submissions)
    assert controls
