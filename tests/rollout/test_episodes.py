"""Episodes of many turns, interrupted and resumed anywhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import (
    EnvironmentLost,
    FinishReason,
    Group,
    Prompt,
    RolloutBatch,
    RolloutScheduler,
    Sample,
    SamplingParams,
    TokenIds,
)
from april.rollout.buffer import Rejection
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.episodes.episodes import EpisodeError
from april.rollout.events import Restarted, Stepped
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import JournalError
from april.rollout.journal.records import decode, encode
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.transition import Transition
from april.simulation import virtual_time
from tests.limits import HANG
from tests.scheduling import scheduler_of, trained_from
from tests.talking import Numbers, Room, TalkingEngine, World, episode, said_by_environment

SAMPLING = SamplingParams(max_tokens=60, max_turns=8, stop_token_ids=(0,))
CONTEXT = 90


class Prompts:
    """Prompts without end, which know their place."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            self.next += 1
            yield Prompt((1, 2, 3), f"prompt {self.next - 1}")

    def state_dict(self) -> int:
        return self.next

    def load_state_dict(self, state: int) -> None:
        self.next = state


async def score(prompt: Prompt, sample: Sample) -> float:
    return sum(transition.reward for transition in sample.transitions)


def build(world: World, limits: EpisodeLimits | None = None, engine_seed: int = 0, **own: Any) -> RolloutScheduler:
    engine = TalkingEngine(own.pop("slots", 6), engine_seed, own.pop("failure_rate", 0.0))
    engine.capacity = type(engine.capacity)(engine.capacity.slots, CONTEXT)
    make = own.pop("make", world)
    episodes = EnvironmentEpisodes(make, Numbers(), CONTEXT, limits or EpisodeLimits(retry_delay=0.0))
    defaults = {
        "rollout_batch_size": 3,
        "over_sampling_batch_size": 8,
        "n_samples_per_prompt": 2,
        "sampling": SAMPLING,
        "retry_delay": 0.0,
    }
    reward = own.pop("score", score)
    return scheduler_of(engine, Prompts(), reward, episodes=episodes, **{**defaults, **own})


async def run(rollouts: RolloutScheduler, steps: int) -> list[RolloutBatch]:
    collected = []
    async with rollouts:
        for _ in range(steps):
            collected.append(await rollouts.next_batch())
            await rollouts.update_weights()
    return collected


def check(group: Group) -> None:
    """A complete group equals the group of an undisturbed run."""
    for sample in group.samples:
        whole, finish, rewards = episode(sample, group.environment_seed, CONTEXT)
        assert sample.response_ids == whole
        assert sample.finish == finish
        assert [transition.reward for transition in sample.transitions[1:]] == rewards
        assert sample.reward == sum(rewards)


SCHEDULES = st.fixed_dictionaries(
    {
        "rollout_batch_size": st.integers(1, 4),
        "extra": st.integers(0, 8),
        "n_samples_per_prompt": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "slots": st.integers(1, 12),
        "failure_rate": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 1000),
        "slowness": st.sampled_from([0, 3, 40]),
        "recovery": st.sampled_from(["replay", "snapshot"]),
    }
)


def scheduled(s: dict[str, Any], world: World | None = None, **own: Any) -> RolloutScheduler:
    s = dict(s)
    size, extra, slowness = s["rollout_batch_size"], s.pop("extra"), s.pop("slowness")
    limits = EpisodeLimits(recovery=s.pop("recovery"), retry_delay=0.0, concurrency=1 + s["seed"] % 5)
    target = min(size + extra, size * (s["max_staleness"] + 1))
    world = world or World(s["seed"], slowness)
    return build(world, limits, s["seed"], over_sampling_batch_size=target, max_retries=20, **s, **own)


@given(SCHEDULES)
@settings(max_examples=40, deadline=None)
def test_an_interrupted_episode_is_the_one_that_nothing_disturbs(s: dict[str, Any]) -> None:
    """Token for token, with interrupts in the middle of a turn, between turns and during an environment's step; the
    books balance and the staleness bound holds."""
    world = World(s["seed"], s["slowness"])
    rollouts = scheduled(s, world)
    steps = asyncio.run(run(rollouts, 6))
    for step in steps:
        assert len(step.groups) == s["rollout_batch_size"]
        assert step.staleness.max() <= s["max_staleness"]
        for group in step.groups:
            check(group)
    buffer = rollouts.buffer
    buffer.check()
    assert buffer.environment_tokens == sum(g.environment_tokens for step in steps for g in step.groups) + sum(
        group.environment_tokens for group in buffer
    )
    assert set(world.steps.values()) <= {1}, "each turn reached its environment once"
    assert not world.alive, "environments are closed with the run"
    for group in buffer:
        for sample in group.samples:
            assert episode(sample, group.environment_seed, CONTEXT)[0][: sample.length] == sample.response_ids


@given(SCHEDULES, st.integers(1, 3), st.integers(0, 400))
@settings(max_examples=15, deadline=None)
def test_a_run_that_dies_resumes_its_episodes(s: dict[str, Any], crashes: int, after: int) -> None:
    """Each incarnation dies after some events of the loop, anywhere; the next one resumes from the journal alone."""
    import tempfile

    async def lives(path: Path, ticks: int | None) -> tuple[list[RolloutBatch], RolloutScheduler]:
        journal = Journal(path, flush_seconds=0)
        rollouts = scheduled(s, journal=journal)
        collected = await trained_from(rollouts, journal, 5, ticks)
        if rollouts.episodes is not None:
            await rollouts.episodes.close()
        journal.close()
        return collected, rollouts

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        for _ in range(crashes):
            asyncio.run(lives(path, after))
        steps, rollouts = asyncio.run(lives(path, None))
        assert len(steps) == 5
        for group in itertools.chain.from_iterable(step.groups for step in steps):
            check(group)
        rollouts.buffer.check()
        assert rollouts.buffer.restarted.groups == 0
        events = [e for e in everything(path) if isinstance(e, Stepped)]
        turns = [(event.sample_id, event.turn) for event in events]
        assert len(set(turns)) == len(turns), "each turn was answered once"


def everything(path: Path) -> list[Any]:
    journal = Journal(path)
    try:
        return list(journal.replay())
    finally:
        journal.close()


async def test_an_interrupt_does_not_wait_for_an_environment() -> None:
    """A step in flight continues during training; its observation is used in the next step."""
    held = asyncio.Event()
    world = World(trouble=lambda what: held.wait() if what == "0.0/0" else None)
    rollouts = build(world)
    async with rollouts:
        step = await asyncio.wait_for(rollouts.next_batch(), HANG)
        assert 0 not in {group.id for group in step.groups}
        assert rollouts.in_flight == 0
        stuck = rollouts.buffer.groups[0].samples[0]
        assert stuck.awaits_environment
        await rollouts.update_weights()
        held.set()
        await asyncio.sleep(0.01)
        assert stuck.awaits_environment, "nothing happens to a sample between two steps"
        later = [await rollouts.next_batch()]
        await rollouts.update_weights()
        later.append(await rollouts.next_batch())
        assert world.steps["0.0/0"] == 1
        groups = {group.id: group for one in later for group in one.groups}
        check(groups[0])


async def test_an_answer_for_a_group_that_is_turned_away_in_that_moment_brings_nothing_back(tmp_path: Path) -> None:
    held, scoring = asyncio.Event(), asyncio.Event()
    world = World(slowness=0, trouble=lambda what: held.wait() if what == "0.0/0" else None)

    async def reward(prompt: Prompt, sample: Sample) -> float:
        if sample.id == "0.1":
            scoring.set()
            await held.wait()
            raise ValueError("no reward")
        return 0.0

    journal = Journal(tmp_path / "journal", flush_seconds=0.01)
    rollouts = build(world, score=reward, on_reward_error="reject", max_staleness=None, journal=journal)
    async with rollouts:
        while not scoring.is_set():
            await rollouts.next_batch()
            await rollouts.update_weights()
        submissions = rollouts.engine.submissions.count("0.0")  # type: ignore[attr-defined]
        held.set()
        await asyncio.sleep(0.01)
        await rollouts.next_batch()
        assert rollouts.buffer.rejected[Rejection.REWARD].groups == 1
        assert rollouts.engine.submissions.count("0.0") == submissions  # type: ignore[attr-defined]
    journal.close()


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_begun_by_a_turn_that_ends_as_the_scheduler_is_left(seed: int) -> None:
    world = World(seed)
    rollouts = build(world, engine_seed=seed, slots=24, overlap=True)
    async with rollouts:
        await rollouts.next_batch()
    await asyncio.sleep(0.01)
    assert not rollouts.episodes
    assert not world.alive


async def test_waiting_counts_for_the_staleness_bound() -> None:
    """A group whose environment is slow is waited for, once nothing else keeps the bound."""
    held = asyncio.Event()
    world = World(trouble=lambda what: held.wait() if what == "0.0/0" else None)
    rollouts = build(world, max_staleness=2, over_sampling_batch_size=9)
    async with rollouts:
        for _ in range(2):
            await rollouts.next_batch()
            await rollouts.update_weights()
        engine: Any = rollouts.engine
        before = len(engine.submissions)
        last = asyncio.create_task(rollouts.next_batch())
        while len(engine.submissions) == before or rollouts.in_flight or len(rollouts.episodes) != 1:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert not last.done()
        held.set()
        step = await last
        assert 0 in {group.id for group in step.groups}
        assert step.environment_wait_seconds > 0
        assert step.staleness.max() <= 2


def fails(*names: str, error: Exception | None = None, times: int = 1) -> Any:
    """Failures at these moments, this many times each."""
    left = dict.fromkeys(names, times)

    def trouble(what: str) -> None:
        if left.get(what, 0) > 0:
            left[what] -= 1
            raise error or RuntimeError("no such tool")

    return trouble


async def test_a_failing_step_can_be_reported_to_the_policy() -> None:
    world = World(trouble=fails("0.0/0"))
    steps = await run(build(world, over_sampling_batch_size=3), 1)
    sample = steps[0].groups[0].samples[0]
    failed = sample.transitions[1]
    assert failed.failed
    assert sample.response_ids[failed.start] == 999
    assert sample.transitions[2:], "the episode goes on"
    assert [(f.kind, f.error) for f in steps[0].failures] == [("environment", "RuntimeError: no such tool")]


async def test_after_a_failure_the_environment_has_its_state_before_the_turn() -> None:
    """Also if the step had an effect before: the environment is constructed again and restored."""

    class Halfway(Room):
        async def step(self, turn: Any) -> Any:
            before = self.words
            answer = await super().step(turn)
            if turn.key == "0.0/1" and self.world.steps[turn.key] == 1:
                raise RuntimeError("halfway")
            assert before == heard.get(turn.key, before)
            heard[turn.key] = before
            return answer

    heard: dict[str, int] = {}
    world = World()
    await run(build(world, make=lambda: Halfway(world), over_sampling_batch_size=3), 1)
    assert heard["0.0/2"] == heard["0.0/1"] if "0.0/1" in heard else True
    assert world.steps["0.0/0"] == 2, "answered, and answered again in the replay"


@pytest.mark.parametrize("on_error", ["end", "reject"])
async def test_a_failing_step_ends_the_episode_or_costs_its_group(on_error: Any) -> None:
    world = World(trouble=fails("0.0/0"))
    rollouts = build(world, EpisodeLimits(on_error=on_error), over_sampling_batch_size=3)
    (step,) = await run(rollouts, 1)
    if on_error == "end":
        assert step.groups[0].samples[0].finish is FinishReason.FAILED
    else:
        assert 0 not in {group.id for group in step.groups}
        assert [(q.group_id, q.reason) for q in step.quarantined] == [(0, Rejection.ENVIRONMENT)]
    for group in step.groups[1:]:
        check(group)
    assert not world.alive


async def test_a_lost_environment_is_replaced_and_restored() -> None:
    world = World(trouble=fails("0.0/1", error=EnvironmentLost("its process died"), times=2))
    rollouts = build(world, over_sampling_batch_size=3)
    (step,) = await run(rollouts, 1)
    check(step.groups[0])
    assert [failure.kind for failure in step.failures] == ["environment lost"] * 2
    assert world.steps["0.0/0"] == 3


async def test_an_environment_that_cannot_begin_costs_its_group_and_nothing_else() -> None:
    count = itertools.count()

    def trouble(what: str) -> None:
        if what == "reset" and next(count) == 0:
            raise OSError("no such file")

    (step,) = await run(build(World(slowness=0, trouble=trouble), EpisodeLimits(max_retries=0)), 1)
    assert [q.error for q in step.quarantined] == ["OSError: no such file"]
    (step,) = await run(build(World(slowness=0, trouble=trouble)), 1)
    assert not step.quarantined


async def test_a_journal_that_cannot_be_written_ends_the_wait_for_environments() -> None:
    """Waiting callers then query the journal, which reports the cause."""

    async def durable() -> None:
        raise JournalError("the disk is full")

    episodes = EnvironmentEpisodes(World(), Numbers(), CONTEXT)
    group = Group.start(0, Prompt((1, 2, 3)), 1, SAMPLING, 0)
    episodes.begin(group.samples[0], group, durable)
    await asyncio.wait_for(episodes.wait(), HANG)
    assert not episodes.take()
    await episodes.close()


async def test_environments_that_all_fail_end_the_run_with_one_line() -> None:
    def trouble(what: str) -> None:
        raise OSError("no such file")

    with pytest.raises(EpisodeError, match=r"environments keep failing.*no such file"):
        await run(build(World(trouble=trouble), EpisodeLimits(retry_delay=0.0, max_retries=1)), 1)


@pytest.mark.parametrize(
    ("state", "said"),
    [(lambda room: {room.words}, r"state\(\) must be JSON types"), (None, r"has no state\(\) and restore\(state\)")],
)
async def test_a_state_that_cannot_be_saved_is_named(state: Any, said: str) -> None:
    class Forgetful(Room):
        pass

    Forgetful.state = state  # type: ignore[method-assign]
    world = World()
    limits = EpisodeLimits(recovery="snapshot", retry_delay=0.0, max_retries=0)
    with pytest.raises(EpisodeError, match=said):
        await run(build(world, limits, make=lambda: Forgetful(world)), 1)


async def test_an_environment_that_hangs_costs_its_time_limit() -> None:
    world = World(trouble=lambda what: asyncio.Event().wait() if what == "0.0/0" else None)
    limits = EpisodeLimits(step_timeout=0.5, on_error="end")
    (step,) = await run(build(world, limits, over_sampling_batch_size=3), 1)
    assert step.groups[0].samples[0].finish is FinishReason.FAILED
    assert [failure.kind for failure in step.failures] == ["environment timeout"]


def test_an_episode_has_a_time_limit_for_its_environment() -> None:
    world = World(trouble=lambda what: asyncio.sleep(0.03) if what.startswith("0.0/") else None)
    limits = EpisodeLimits(deadline=0.05)
    (step,) = virtual_time.run(run(build(world, limits, over_sampling_batch_size=3), 1))
    sample = step.groups[0].samples[0]
    assert sample.finish is FinishReason.DEADLINE
    assert sample.truncated


async def test_an_environment_with_different_observations_on_replay_restarts() -> None:
    """Two environments with one seed that disagree: counted, and the books balance."""

    class Moody(Room):
        async def reset(self, prompt: Any, seed: int) -> TokenIds:
            moods.append(len(moods))
            observation = await super().reset(prompt, seed)
            return TokenIds((*observation, 500 + len(moods)))

    moods: list[int] = []
    world = World(trouble=fails("0.0/1", error=EnvironmentLost("gone")))
    rollouts = build(world, make=lambda: Moody(world), over_sampling_batch_size=3)
    (step,) = await run(rollouts, 1)
    assert rollouts.buffer.restarted.groups == 1
    assert rollouts.buffer.restarted.tokens > 0
    rollouts.buffer.check()
    assert [failure.kind for failure in step.failures] == ["environment lost", "environment restart"]
    assert step.groups[0].samples[0].attempt == 1
    assert "0.0~1/0" in world.steps, "a new attempt has keys of its own"


async def test_recovery_by_restart_begins_again() -> None:
    world = World(trouble=fails("0.0/1", error=EnvironmentLost("gone")))
    rollouts = build(world, EpisodeLimits(recovery="restart", retry_delay=0.0), over_sampling_batch_size=3)
    (step,) = await run(rollouts, 1)
    assert rollouts.buffer.restarted.groups == 1
    check(step.groups[0])


async def test_recovery_without_state_resets_alone() -> None:
    world = World(trouble=fails("0.0/1", error=EnvironmentLost("gone")))
    rollouts = build(world, EpisodeLimits(recovery="stateless", retry_delay=0.0), over_sampling_batch_size=3)
    await run(rollouts, 1)
    assert world.steps["0.0/0"] == 1
    assert rollouts.buffer.restarted.groups == 0


async def test_an_observation_that_is_larger_than_the_context_ends_the_episode() -> None:
    class Loud(Room):
        async def step(self, turn: Any) -> Any:
            answer = await super().step(turn)
            return type(answer)(TokenIds(range(100, 100 + CONTEXT)), 0.25) if turn.sample_id == "0.0" else answer

    world = World()
    (step,) = await run(build(world, make=lambda: Loud(world), over_sampling_batch_size=3), 1)
    sample = step.groups[0].samples[0]
    assert sample.finish is FinishReason.CONTEXT
    assert sample.truncated
    assert sample.reward == 0.25


async def test_a_sentence_that_cannot_be_bridged_ends_the_episode_with_a_reason() -> None:
    class Talker(Room):
        async def step(self, turn: Any) -> Any:
            answer = await super().step(turn)
            return type(answer)("words") if turn.sample_id == "0.0" else answer

    world = World()
    (step,) = await run(build(world, make=lambda: Talker(world), over_sampling_batch_size=3), 1)
    assert step.groups[0].samples[0].finish is FinishReason.BRIDGE


async def test_evaluation_has_episodes_too() -> None:
    world = World(trouble=fails("evaluation 0.0/0", error=EnvironmentLost("gone")))
    rollouts = build(world)
    async with rollouts:
        await rollouts.next_batch()
        before = list(world.alive)
        groups = await rollouts.evaluate([Prompt((1, 2), "a"), Prompt((3,), "b")], 2)
        for group in groups:
            for sample in group.samples:
                whole, finish, _ = episode(sample, group.environment_seed, CONTEXT)
                assert (sample.response_ids, sample.finish) == (whole, finish)
        assert all(room in before for room in world.alive), "an evaluation's environments end with it"


async def test_an_evaluation_leaves_the_runs_own_environments_alone() -> None:
    """Also where none of them is at work at the moment."""
    world = World(slowness=0)
    async with build(world, partial_rollout=True) as rollouts:
        await rollouts.next_batch()
        while len(rollouts.episodes):  # their steps end during training
            await asyncio.sleep(0)
        alive = set(world.alive)
        assert alive
        await rollouts.evaluate([Prompt((1, 2), "a")], 2)
        assert alive <= world.alive
        await rollouts.update_weights()
        for group in (await rollouts.next_batch()).groups:
            check(group)


def test_plain_environments_run_in_threads() -> None:
    class Plain:
        def reset(self, prompt: Any, seed: int) -> TokenIds:
            self.seed, self.words = seed, 0
            return said_by_environment(seed, 0)[0]

        def step(self, turn: Any) -> Any:
            from april import EnvStep

            self.words += len(turn.token_ids)
            return EnvStep(*said_by_environment(self.seed, self.words))

        def close(self) -> None: ...

    (step,) = asyncio.run(run(build(World(), make=Plain), 1))
    for group in step.groups:
        check(group)


def test_events_survive_the_journal() -> None:
    ended = Transition(9, 0, 1.5, True, "y", 0.25, True, {"a": [1]})
    events = [
        Stepped("0.0", -1, "ab", [1, 2], Transition(0, 2, observation="x", seconds=0.5)),
        Stepped("0.0", 0, "cd", [], ended, FinishReason.DONE, {"s": 1}),
        Stepped("0.0", 1, "ef", [9, 9, 3], Transition(9, 3), features=(Feature("a#1/b", "5c", 12, 2),)),
        Restarted("0.1", "replay"),
    ]
    assert [event for record in encode(events, 1) for event in decode(record)] == events


async def test_the_length_of_an_episode_is_learned_when_its_environment_ends_it() -> None:
    """Turns end before their environments answer: no interval in the engine is marked as the last one."""
    rollouts = build(World(slowness=10))
    steps = await run(rollouts, 30)
    lengths = [sample.policy_tokens for step in steps for group in step.groups for sample in group.samples]
    assert rollouts.state.lengths.mean == pytest.approx(sum(lengths) / len(lengths), rel=0.25)
