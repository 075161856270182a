from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import (
    Chunk,
    ChunkError,
    EngineError,
    Group,
    Prompt,
    RejectionError,
    Reward,
    RewardError,
    RolloutBatch,
    RolloutParams,
    RolloutScheduler,
    Sample,
    SamplingParams,
    StalenessError,
)
from april.rollout.buffer import Rejection
from tests.limits import HANG
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine, logprob, response


def prompts() -> Iterator[Prompt]:
    return (Prompt((1, 2, i), f"prompt {i}", {"number": i}) for i in itertools.count())


async def score(prompt: Prompt, sample: Sample) -> float:
    return float(sample.length % 2)


def scheduler(engine: ScriptedEngine, **settings: object) -> RolloutScheduler:
    defaults: dict[str, object] = {
        "rollout_batch_size": 3,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": 2,
        "sampling": SamplingParams(max_tokens=60),
        "retry_delay": 0.0,
    }
    return scheduler_of(engine, **{"prompts": prompts(), "reward": score, **defaults, **settings})


async def run(scheduler: RolloutScheduler, steps: int) -> list[RolloutBatch]:
    collected = []
    async with scheduler:
        for _ in range(steps):
            collected.append(await scheduler.next_batch())
            await scheduler.update_weights()
    return collected


SETTINGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "extra": st.integers(0, 8),
        "group_size": st.integers(1, 4),
        "max_staleness": st.one_of(st.none(), st.integers(0, 3)),
        "slots": st.integers(1, 20),
        "seed": st.integers(0, 1000),
        "failure_rate": st.sampled_from([0.0, 0.05]),
        "filtered": st.booleans(),
        "reward_delay": st.integers(0, 3),
        "auto": st.sampled_from([False, False, True]),
        "first_come": st.booleans(),
        "ramp_steps": st.integers(0, 3),
        "admission_window": st.one_of(st.none(), st.integers(1, 8)),
    }
)


def build(s: dict[str, object], engine_seed: int = 0, **others: object) -> tuple[ScriptedEngine, RolloutScheduler]:
    batch_size, bound = s["batch_size"], s["max_staleness"]
    over_sampling = batch_size + s["extra"]
    if bound is not None:
        over_sampling = min(over_sampling, batch_size * (bound + 1))

    async def slow_score(prompt: Prompt, sample: Sample) -> float:
        for _ in range(s["reward_delay"] * (sample.seed % 3)):
            await asyncio.sleep(0)
        return float(sample.length % 2)

    engine = ScriptedEngine(s["slots"], s["seed"] + engine_seed, s["failure_rate"])
    return engine, scheduler(
        engine,
        reward=slow_score,
        rollout_batch_size=batch_size,
        over_sampling_batch_size="auto" if s["auto"] else over_sampling,
        n_samples_per_prompt=s["group_size"],
        max_staleness=bound,
        first_come=s["first_come"] and bound is None,
        ramp_steps=s["ramp_steps"],
        admission_window=s["admission_window"],
        dynamic_filter=(lambda group: sum(x.length for x in group.samples) % 3 > 0) if s["filtered"] else None,
        max_retries=20,
        seed=s["seed"],
        **others,
    )


@given(SETTINGS)
@settings(max_examples=150, deadline=None)
def test_every_step_has_n_complete_groups_and_no_group_is_lost(s: dict[str, object]) -> None:
    """Conservation, exactly-once and the staleness bound, under random schedules, failures, filters and bounds."""
    engine, rollouts = build(s)
    steps = asyncio.run(run(rollouts, 8))
    check_conservation(s, engine, rollouts, steps)
    if s["max_staleness"] is not None:
        assert max(step.staleness.max() for step in steps) <= s["max_staleness"]


def check_conservation(
    s: dict[str, object], engine: ScriptedEngine, rollouts: RolloutScheduler, steps: list[RolloutBatch]
) -> None:
    """Every group is in one place, with every token that the engine handed out."""
    buffer = rollouts.buffer
    trained = [group for step in steps for group in step.groups]
    ids = [group.id for group in trained] + [group.id for group in buffer]
    rejected = set(range(buffer.admitted)) - set(ids)
    assert len(ids) == len(set(ids)), "every admitted group is in exactly one place"
    assert len(rejected) == sum(tally.groups for tally in buffer.rejected.values())
    assert {id for step in steps for id, _ in step.rejections} <= rejected
    assert all(len(step.groups) == s["batch_size"] for step in steps)
    assert all(group.complete and group.rewarded for group in trained)

    ledger = dict(engine.ledger)
    for group in [*trained, *buffer]:
        assert group.prompt.metadata["number"] == group.id, "prompts are consumed once each, in order"
        for sample in group.samples:
            assert sample.response_ids == ledger.pop(sample.id, []), "every token handed out is in its sample"
            whole = response(sample.seed, 60)
            assert sample.response_ids == whole[: sample.length]
            assert (sample.finish is not None) == (sample.length == len(whole))
            expected = [logprob(t, v) for t, v in zip(sample.response_ids, sample.versions, strict=True)]
            assert sample.logprobs.tolist() == pytest.approx(expected)
    assert {int(id.split(".")[0]) for id in ledger} <= rejected
    assert buffer.discarded_tokens == 0
    assert buffer.sampled_tokens == sum(map(len, engine.ledger.values()))


@given(SETTINGS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_restored_scheduler_continues_with_the_same_groups(s: dict[str, object], stop_after: int) -> None:
    """A saved and restored scheduler trains on the same groups as one that never stopped.

    If rewards take time, rewards of the last step are still being computed when the run stops, and are computed again
    after the restart, so a group may be trained on a step earlier or later: then only its content is compared. With
    `first_come` and a filter, too: it is not saved in which order groups were complete whose rewards are missing.
    N' is fixed: the automatic choice also depends on durations.
    """
    s = {**s, "auto": False}

    async def straight() -> list[RolloutBatch]:
        engine, rollouts = build(s)
        collected = []
        async with rollouts:
            for n in range(7):
                if n == stop_after:  # a restarted engine returns its tokens in other portions
                    engine.rng.seed(99)
                collected.append(await rollouts.next_batch())
                await rollouts.update_weights()
        return collected

    async def interrupted() -> list[RolloutBatch]:
        engine, rollouts = build(s, prompts=Counted())
        collected = []
        async with rollouts:
            for _ in range(stop_after):
                collected.append(await rollouts.next_batch())
                await rollouts.update_weights()
            state = rollouts.state_dict()
        revived, again = build(s, prompts=Counted())
        revived.rng.seed(99)
        revived.ledger, revived.version = engine.ledger, engine.version
        again.load_state_dict(state)
        async with again:
            for _ in range(7 - stop_after):
                collected.append(await again.next_batch())
                await again.update_weights()
        return collected

    def content(steps: list[RolloutBatch]) -> list[list[dict[str, object]]]:
        return [[group.to_dict() for group in step.groups] for step in steps]

    def tokens(group: dict[str, object]) -> list[list[int]]:
        return [[id for _, ids, _ in sample["segments"] for id in ids] for sample in group["samples"]]

    expected, found = content(asyncio.run(straight())), content(asyncio.run(interrupted()))
    verdicts_order = s["first_come"] and s["filtered"] and s["max_staleness"] is None
    if s["reward_delay"] == 0 and not verdicts_order:
        assert found == expected
    assert found[:stop_after] == expected[:stop_after]
    for step_expected, step_found in zip(expected, found, strict=True):
        assert len(step_found) == len(step_expected)
    responses = [{group["id"]: tokens(group) for step in steps for group in step} for steps in (expected, found)]
    for id in responses[0].keys() & responses[1].keys():
        assert responses[0][id] == responses[1][id]


class Counted:
    """A stream of prompts that remembers its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            self.position += 1
            yield Prompt((1, 2, self.position - 1), f"prompt {self.position - 1}", {"number": self.position - 1})

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


async def test_synchronous_rollouts_are_on_policy() -> None:
    engine = ScriptedEngine()
    rollouts = scheduler(engine, partial_rollout=False)
    for step in await run(rollouts, 5):
        assert step.off_policy_token_share == 0
        assert step.staleness.tolist() == [0, 0, 0]
        assert step.buffered_groups == 0
        assert not step.interrupted_samples


async def test_unfinished_groups_resume_first_in_order_of_age() -> None:
    engine = ScriptedEngine(slots=100)
    rollouts = scheduler(engine)
    async with rollouts:
        await rollouts.next_batch()
        unfinished = [s.id for group in rollouts.buffer for s in group.samples if s.finish is None]
        assert unfinished, "the workload is meant to leave something unfinished"
        engine.submissions.clear()
        await rollouts.update_weights()
        await rollouts.next_batch()
    assert engine.submissions[: len(unfinished)] == unfinished


async def test_surplus_complete_groups_are_trained_first_in_the_next_step() -> None:
    engine = ScriptedEngine(slots=100)
    rollouts = scheduler(engine, sampling=SamplingParams(max_tokens=1))
    async with rollouts:
        first = await rollouts.next_batch()
        assert first.surplus_groups == 3, "all six finish at once, three are trained on"
        waiting = [group.id for group in rollouts.buffer]
        await rollouts.update_weights()
        second = await rollouts.next_batch()
    assert [group.id for group in second.groups] == waiting
    assert second.staleness.tolist() == [1, 1, 1]


async def test_a_slow_reward_does_not_delay_the_interrupt() -> None:
    """Generation stops when enough groups are complete, whether they are scored yet or not."""
    engine = ScriptedEngine(slots=100)
    release = asyncio.Event()
    interrupted = asyncio.Event()

    async def slow(prompt: Prompt, sample: Sample) -> float:
        await release.wait()
        return 1.0

    interrupt = engine.interrupt

    async def watched(sample_ids: Iterable[str] | None = None) -> list:  # type: ignore[type-arg]
        interrupted.set()
        return await interrupt(sample_ids)

    engine.interrupt = watched  # type: ignore[method-assign]
    rollouts = scheduler(engine, reward=slow)
    async with rollouts:
        step = asyncio.create_task(rollouts.next_batch())
        await asyncio.wait_for(interrupted.wait(), HANG)
        assert not step.done()
        release.set()
        assert all(group.rewarded for group in (await step).groups)


def test_a_synchronous_reward_function_runs_during_generation() -> None:
    import threading

    threads = set()

    def plain(prompt: Prompt, sample: Sample) -> float:
        threads.add(threading.current_thread())
        return 1.0

    asyncio.run(run(scheduler(ScriptedEngine(), reward=plain), 2))
    assert threads
    assert threading.main_thread() not in threads


async def test_whole_group_rewards() -> None:
    async def rank(prompt: Prompt, samples: list[Sample]) -> list[float]:
        longest = max(samples, key=lambda s: s.length)
        return [float(s is longest) for s in samples]

    for step in await run(scheduler(ScriptedEngine(), reward=rank, reward_scope="group"), 3):
        assert all(sum(s.reward for s in group.samples) == 1 for group in step.groups)


def failing(prompt: Prompt, sample: Sample) -> float:
    if prompt.metadata["number"] == 1:
        raise RuntimeError("cannot parse this answer")
    return 1.0


async def test_a_failing_reward_names_its_prompt_and_stops_the_run_without_loss() -> None:
    engine = ScriptedEngine()
    rollouts = scheduler(engine, reward=failing)
    async with rollouts:
        with pytest.raises(RewardError, match=r"prompt 1.*cannot parse this answer"):
            await run_until_error(rollouts)
        rollouts.buffer.check()
        assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values()))
        rollouts.state_dict()


async def run_until_error(rollouts: RolloutScheduler) -> None:
    for _ in range(10):
        await rollouts.next_batch()
        await rollouts.update_weights()


async def test_a_failing_reward_can_count_as_zero() -> None:
    steps = await run(scheduler(ScriptedEngine(), reward=failing, on_reward_error="zero"), 6)
    rewards = {group.id: [s.reward for s in group.samples] for step in steps for group in step.groups}
    assert rewards.pop(1) == [0.0, 0.0]
    assert all(values == [1.0, 1.0] for values in rewards.values())
    failures = [f for step in steps for f in step.failures]
    assert {(f.kind, f.prompt_id) for f in failures} == {("reward", "prompt 1")}


async def test_a_group_with_a_failing_reward_can_be_rejected() -> None:
    rollouts = scheduler(ScriptedEngine(), reward=failing, on_reward_error="reject")
    steps = await run(rollouts, 6)
    assert 1 not in {group.id for step in steps for group in step.groups}
    assert rollouts.buffer.rejected[Rejection.REWARD].groups == 1


async def test_a_reward_that_takes_too_long_is_a_failure() -> None:
    async def hanging(prompt: Prompt, sample: Sample) -> float:
        await asyncio.Event().wait()
        return 0.0

    with pytest.raises(RewardError, match="no reward within"):
        await run(scheduler(ScriptedEngine(), reward=hanging, reward_timeout=0.05), 1)


async def test_a_timeout_error_of_a_reward_without_a_time_limit_is_a_failure() -> None:
    """A TimeoutError without a message, as `asyncio.wait_for` raises it, although no time limit is set."""

    async def gives_up(prompt: Prompt, sample: Sample) -> float:
        raise TimeoutError

    with pytest.raises(RewardError, match="the reward function raised TimeoutError"):
        await run(scheduler(ScriptedEngine(), reward=gives_up), 1)


async def test_pending_work_of_a_rejected_group_is_cancelled() -> None:
    """The second sample's reward would never end; the first one's failure takes it along."""
    ended = []

    async def score(prompt: Prompt, sample: Sample) -> float:
        if sample.group_id:
            return 1.0
        if sample.index == 0:
            raise ValueError("no such judge")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(sample.id)
        return 0.0

    rollouts = scheduler(ScriptedEngine(), reward=score, on_reward_error="reject", seed=6)
    async with rollouts:
        await rollouts.next_batch()
        assert ended == ["0.1"], "at once, not when the run ends"
    assert rollouts.buffer.rejected[Rejection.REWARD].groups == 1


async def test_hanging_synchronous_rewards_delay_no_other_reward_and_are_then_not_called() -> None:
    """More hang than there are threads; every other sample is scored all the same, until too many hang."""
    never, called = threading.Event(), Counter[str]()

    def hanging(prompt: Prompt, sample: Sample) -> float:
        called["hang" if sample.group_id < 3 else "fine"] += 1
        if sample.group_id < 3:
            never.wait()
        return 1.0

    settings = {"over_sampling_batch_size": 3, "reward_timeout": 2.0, "on_reward_error": "reject"}
    rollouts = scheduler(ScriptedEngine(), reward=hanging, **settings)
    steps = await run(rollouts, 1)
    assert called["hang"] == 6
    quarantined = {q.group_id: q.error for step in steps for q in step.quarantined}
    assert quarantined == dict.fromkeys(range(3), "no reward within 2 s")

    begun = []
    stuck = scheduler(
        ScriptedEngine(),
        reward=lambda prompt, sample: begun.append(sample.id) or never.wait(),
        reward_timeout=0.01,
        on_reward_error="reject",
    )
    with pytest.raises(RewardError, match="no reward can be computed any more: 8 calls hang already"):
        await run(stuck, 1)
    assert 8 <= len(begun) < 16, "those that were running already, and no more"
    never.set()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, 1j, object(), b"1"])
async def test_a_reward_of_a_wrong_kind_is_a_failure(value: object) -> None:
    with pytest.raises(RewardError, match="no finite number"):
        await run(scheduler(ScriptedEngine(), reward=lambda prompt, sample: value), 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
async def test_a_non_finite_reward_is_a_failure(value: object) -> None:
    with pytest.raises(RewardError, match="no finite number"):
        await run(scheduler(ScriptedEngine(), reward=lambda prompt, sample: value), 1)


async def test_a_rejected_group_is_replaced_by_one_new_prompt() -> None:
    rollouts = scheduler(ScriptedEngine(slots=100), dynamic_filter=lambda group: group.id % 2 == 0)
    async with rollouts:
        step = await rollouts.next_batch()
        assert all(group.id % 2 == 0 for group in step.groups)
        assert len(rollouts.buffer) + 3 <= 6
        assert rollouts.buffer.admitted == 6 + len(step.rejections)


async def test_a_filter_that_rejects_everything_ends_in_an_error() -> None:
    rollouts = scheduler(ScriptedEngine(), dynamic_filter=lambda group: False, max_rejected_groups=20)
    with pytest.raises(RejectionError, match=r"21 groups of this step were rejected \(filter: 21\)"):
        await run(rollouts, 1)


async def test_an_engine_that_only_fails_ends_in_an_error() -> None:
    with pytest.raises(EngineError, match=r"outage_limit = 0\.2\): scripted failure"):
        await run(scheduler(ScriptedEngine(broken=True), outage_limit=0.2), 1)


async def test_a_dead_engine_loses_no_token_and_the_step_can_be_repeated() -> None:
    engine = ScriptedEngine()
    polls = 0

    def die(_: RolloutScheduler) -> None:
        nonlocal polls
        polls += 1
        engine.dead = polls == 4

    rollouts = scheduler(engine, on_progress=die)
    async with rollouts:
        with pytest.raises(EngineError):
            await rollouts.next_batch()
        assert rollouts.in_flight == 0
        engine.dead = False
        engine.flight.clear()
        step = await rollouts.next_batch()
    assert len(step.groups) == 3
    assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values()))


async def test_cancelling_a_step_keeps_every_token() -> None:
    engine = ScriptedEngine()
    rollouts = scheduler(engine)
    async with rollouts:
        step = asyncio.create_task(rollouts.next_batch())
        for _ in range(6):
            await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert rollouts.in_flight == 0
        assert rollouts.buffer.sampled_tokens == sum(map(len, engine.ledger.values())) > 0
        rollouts.buffer.check()
        assert len((await rollouts.next_batch()).groups) == 3


async def test_evaluation_bypasses_the_buffer_and_repeats_itself() -> None:
    engine = ScriptedEngine(failure_rate=0.05)
    rollouts = scheduler(engine)
    held_out = [Prompt((7, i), f"held out {i}") for i in range(4)]
    async with rollouts:
        await rollouts.next_batch()
        before = rollouts.state_dict()
        first = await rollouts.evaluate(held_out, 3)
        second = await rollouts.evaluate(held_out, 3)
        assert rollouts.state_dict() == before
    assert [g.prompt for g in first] == held_out
    assert all(group.complete and len(group.samples) == 3 for group in first)

    def ids(groups: list[Group]) -> list[list[int]]:
        return [s.response_ids for g in groups for s in g.samples]

    assert ids(first) == ids(second)


async def test_a_second_weight_update_that_would_break_the_bound_is_refused() -> None:
    rollouts = scheduler(ScriptedEngine(slots=100), max_staleness=1)
    async with rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights()
        with pytest.raises(StalenessError, match="max_staleness = 1"):
            await rollouts.update_weights()


async def test_an_exhausted_prompt_stream_is_a_clear_error() -> None:
    params = RolloutParams(rollout_batch_size=3, n_samples_per_prompt=1)
    rollouts = RolloutScheduler(ScriptedEngine(), [Prompt((1,)), Prompt((2,))], score, params)
    with pytest.raises(ValueError, match="prompts ran out: 2 complete groups where a step needs 3"):
        await run(rollouts, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"over_sampling_batch_size": 2}, "less than rollout_batch_size"),
        ({"over_sampling_batch_size": 7, "max_staleness": 1}, "cannot keep max_staleness = 1"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt"),
        ({"rollout_batch_size": 0}, "rollout_batch_size"),
        ({"on_reward_error": "ignore"}, "on_reward_error"),
        ({"reward_scope": "batch"}, "reward_scope"),
        ({"reward_timeout": 0}, "reward_timeout"),
        ({"first_come": True}, "first_come cannot keep max_staleness = 5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(ScriptedEngine(), **settings)


class Breaking(ScriptedEngine):
    """Its fifth chunk is what `broken` makes of it."""

    def __init__(self, broken: Callable[[Chunk], Chunk]) -> None:
        super().__init__(slots=100)
        self.broken_at, self.make = 5, broken

    async def poll(self) -> list[Chunk]:
        chunks = await super().poll()
        self.broken_at -= len(chunks)
        if -len(chunks) < self.broken_at <= 0:
            chunks[0] = self.make(chunks[0])
        return chunks


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"version": 7}, "that breaks a rule: the engine's policy version is 0"),
        ({"version": -2}, "the engine's policy version is 0"),
        ({"token_ids": [1] * 61, "logprobs": [-1.0] * 61}, "61 tokens came where the response budget leaves"),
        ({"token_ids": [1, 2], "logprobs": [-1.0]}, "2 tokens came with 1 log-probabilities"),
        ({"token_ids": [1], "logprobs": [float("nan")]}, "a log-probability is no finite number"),
        ({"sample_id": "nobody"}, "sample nobody: .* no such sample is in flight"),
    ],
)
async def test_an_invalid_chunk_is_named_and_valid_chunks_are_kept(change: dict[str, Any], rule: str) -> None:
    engine = Breaking(lambda chunk: chunk._replace(**change))
    rollouts = scheduler(engine)
    async with rollouts:
        with pytest.raises(ChunkError, match=rule):
            await rollouts.next_batch()
        rollouts.buffer.check()
        assert rollouts.buffer.sampled_tokens > 0
        assert rollouts.in_flight == 0


async def test_the_info_of_a_reward_is_kept_and_becomes_metrics() -> None:
    def reward(prompt: Prompt, sample: Sample) -> Reward:
        return Reward(1.0, {"format": sample.index, "comment": "fine"})

    rollouts = scheduler(ScriptedEngine(), reward=reward)
    async with rollouts:
        step = await rollouts.next_batch()
        assert step.metrics()["reward/format"] == 0.5
        assert "reward/comment" not in step.metrics()
        again = scheduler(ScriptedEngine())
        again.load_state_dict(json.loads(json.dumps(rollouts.state_dict())))
    sample = step.groups[0].samples[1]
    assert (sample.reward, sample.reward_info) == (1.0, {"format": 1, "comment": "fine"})
    assert [g.to_dict() for g in again.buffer] == [g.to_dict() for g in rollouts.buffer]


async def test_weights_are_loaded_without_a_new_version() -> None:
    engine = ScriptedEngine()
    rollouts = scheduler(engine)
    async with rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights()
        engine.version = -1
        await rollouts.update_weights(version=rollouts.engine_version)
    assert engine.version == rollouts.engine_version == 1
