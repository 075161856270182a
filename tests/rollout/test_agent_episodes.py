"""Episodes of programs: random trees of requests, interrupted, repeated and resumed anywhere."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import FinishReason, Group, Prompt, RolloutBatch, RolloutScheduler, Sample, SamplingParams
from april.rollout.episodes import turn_places
from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.rollout.episodes.turns import TurnRequest
from april.rollout.events import Branched, Ended
from april.rollout.journal.journal import Journal
from april.rollout.journal.records import decode, encode
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.segment import ENVIRONMENT
from april.rollout.trajectory.transition import Transition
from tests.branching import Client, Programs, Script, TreeEngine, WordRenderer, one_after_the_other, tree
from tests.rollout.test_episodes import Prompts
from tests.scheduling import scheduler_of, trained_from
from tests.scripted_engine import logprob
from tests.talking import STOP, token


@pytest.fixture(autouse=True, scope="module")
def _share_short_beginnings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_places, "LEAST_SHARED", 1)
        yield


SAMPLING = SamplingParams(max_tokens=60, max_turns=40, stop_token_ids=(STOP,))
CONTEXT = 400


async def score(prompt: Prompt, sample: Sample) -> float:
    return sum(transition.reward for transition in sample.transitions)


def build(world: Programs, limits: EpisodeLimits | None = None, **own: Any) -> RolloutScheduler:
    engine = TreeEngine(own.pop("slots", 6), own.pop("seed", 0), own.pop("failure_rate", 0.0))
    context = own.pop("context", CONTEXT)
    engine.capacity = type(engine.capacity)(engine.capacity.slots, context)
    episodes = world.episodes = AgentEpisodes(
        world, WordRenderer(), context, limits or EpisodeLimits(retry_delay=0.0, parallel_turns=3)
    )
    defaults = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "n_samples_per_prompt": 2,
        "sampling": SAMPLING,
        "retry_delay": 0.0,
    }
    return scheduler_of(engine, Prompts(), score, episodes=episodes, **{**defaults, **own})


def check(group: Group, world: Programs) -> None:
    """Every trained token is one that the policy drew in that context, with its log-probability and version; every
    turn that a program received is in exactly one sequence."""
    assert not world.wrong, world.wrong[0]
    turns: dict[str, Sample] = {}
    for sample in group.samples:
        assert sample.origin is not None
        context = list(sample.prompt_ids)
        for segment in sample.segments:
            for drawn, logp in zip(segment.token_ids, segment.logprobs, strict=True):
                if segment.version != ENVIRONMENT:
                    assert drawn == token(sample.seed, context)
                    assert logp == logprob(drawn, segment.version)
                context.append(drawn)
        for turn in range(sample.turns):
            check_temperature(sample, turn)
            name = f"{sample.id}{f'~{sample.attempt}' if sample.attempt else ''}/{turn}"
            turns[name] = sample
            if (reply := world.noted.get(name)) is not None:
                start, end = sample.turn_span(turn)
                assert tuple(reply.token_ids) == sample.turn_ids(turn)
                whole = [*sample.prompt_ids, *sample.response_ids]
                assert list(reply.prompt_ids) == whole[: len(sample.prompt_ids) + start]
                assert list(reply.logprobs) == sample.logprobs_between(start, end)
                assert list(reply.versions) == sample.versions[start:end].tolist()
    assert group.complete
    for episode in group.episodes:
        assert len({sample.reward for sample in episode}) == 1
        assert sum(sample.transitions[-1].done for sample in episode) == 1
        assert all(sample.policy_tokens for sample in episode[1:])


def check_temperature(sample: Sample, turn: int) -> None:
    asked = sample.transitions[turn].request
    assert asked is not None
    start, end = sample.turn_span(turn)
    temperatures = sample.temperatures
    expected = asked.get("temperature", sample.sampling.temperature) or 1.0
    assert set([] if temperatures is None else temperatures[start:end].tolist()) <= {expected}
    assert temperatures is not None or "temperature" not in asked


SCHEDULES = st.fixed_dictionaries(
    {
        "rollout_batch_size": st.integers(1, 3),
        "extra": st.integers(0, 6),
        "n_samples_per_prompt": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "slots": st.integers(1, 12),
        "failure_rate": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 1000),
        "overlap": st.booleans(),
        "parallel_turns": st.integers(1, 4),
    }
)


def scheduled(s: dict[str, Any], world: Programs, **own: Any) -> RolloutScheduler:
    s = dict(s)
    size, extra = s["rollout_batch_size"], s.pop("extra")
    limits = EpisodeLimits(retry_delay=0.0, parallel_turns=s.pop("parallel_turns"))
    target = min(size + extra, size * (s["max_staleness"] + 1))
    return build(world, limits, over_sampling_batch_size=target, max_retries=20, **s, **own)


async def steps_of(rollouts: RolloutScheduler, count: int) -> list[RolloutBatch]:
    collected = []
    async with rollouts:
        for _ in range(count):
            collected.append(await rollouts.next_batch())
            await rollouts.update_weights()
    return collected


@given(SCHEDULES, st.sampled_from([tree, one_after_the_other]))
@settings(max_examples=40, deadline=None)
def test_every_turn_of_a_tree_is_trained_on_once(s: dict[str, Any], script: Script) -> None:
    world = Programs(script)
    rollouts = scheduled(s, world)
    engine: Any = rollouts.engine
    steps = asyncio.run(steps_of(rollouts, 4))
    groups = [group for step in steps for group in step.groups]
    for step in steps:
        assert step.staleness.max() <= s["max_staleness"]
    for group in groups:
        assert group.size == s["n_samples_per_prompt"]
        check(group, world)
    rollouts.buffer.check()
    assert rollouts.buffer.restarted.groups == 0
    assert not rollouts.buffer.rejected or not sum(t.groups for t in rollouts.buffer.rejected.values())
    drawn = sum(group.tokens for group in [*groups, *rollouts.buffer])
    behind = sum(step.tokens_behind_stops for step in steps) + rollouts._shared.take_behind_stops()
    assert drawn + behind == engine.drawn, "no token is lost, and none is trained on twice"
    assert world.alive == 0
    if script is one_after_the_other:
        assert all(len(group.samples) == group.size for group in groups)


@given(SCHEDULES, st.sampled_from([tree, one_after_the_other]), st.integers(1, 3), st.integers(0, 400))
@settings(max_examples=15, deadline=None)
def test_a_run_that_dies_goes_on_with_its_conversations(
    s: dict[str, Any], script: Script, crashes: int, after: int
) -> None:
    """Each incarnation dies after some events of the loop; the next one continues from the journal alone: its programs
    start again and get the same turns."""
    world = Programs(script)

    async def lives(path: Path, ticks: int | None) -> tuple[list[RolloutBatch], RolloutScheduler]:
        journal = Journal(path, flush_seconds=0)
        rollouts = scheduled(s, world, journal=journal)
        collected = await trained_from(rollouts, journal, 4, ticks)
        if ticks is None:
            await rollouts.__aexit__()
        elif rollouts.episodes is not None:
            await rollouts._loop.stop()
            await rollouts.episodes.close()
        journal.close()
        return collected, rollouts

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        for _ in range(crashes):
            asyncio.run(lives(path, after))
        steps, rollouts = asyncio.run(lives(path, None))
    assert len(steps) == 4
    for step in steps:
        for group in step.groups:
            check(group, world)
    rollouts.buffer.check()
    if script is one_after_the_other:
        assert rollouts.buffer.restarted.groups == 0


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_a_saved_state_has_the_same_sequences_and_continues(seed: int) -> None:
    """Conversations are saved in the middle of turns; programs start again and get the same turns."""
    s = {
        **{"rollout_batch_size": 2, "extra": 4, "n_samples_per_prompt": 2, "max_staleness": 2, "slots": 5},
        **{"failure_rate": 0.0, "seed": seed, "overlap": False, "parallel_turns": 3},
    }
    world = Programs(tree)

    async def first() -> tuple[str, list[Group]]:
        rollouts = scheduled(s, world)
        async with rollouts:
            for _ in range(2):
                await rollouts.next_batch()
                await rollouts.update_weights()
            return json.dumps(rollouts.state_dict()), list(rollouts.buffer)

    async def second(state: str, before: list[Group]) -> list[RolloutBatch]:
        rollouts = scheduled(s, world)
        rollouts.load_state_dict(json.loads(state))
        await rollouts.engine.update_weights(rollouts.engine_version, None)
        for old, new in zip(before, rollouts.buffer, strict=True):
            assert json.dumps(new.to_dict()) == json.dumps(old.to_dict())
            for one, other in zip(old.samples, new.samples, strict=True):
                assert (one.id, one.prompt_ids, one.turn_limit) == (other.id, other.prompt_ids, other.turn_limit)
        return await steps_of(rollouts, 3)

    state, before = asyncio.run(first())
    for step in asyncio.run(second(state, before)):
        for group in step.groups:
            check(group, world)


def test_the_events_of_programs_survive_the_journal() -> None:
    request = {"messages": [{"role": "user", "content": "ä"}], "after": None, "tools": [{}], "max_tokens": 3}
    events = [
        Branched(3, 5, 1, 0, 17, (1, 9, 9), Transition(0, 0, number=4, request=request), (Feature("a", "5c", 18, 2),)),
        Branched(3, 1, 1, None, 0, (), Transition(0, 0, number=0, request=request)),
        Ended(3, 1, 5, FinishReason.DONE, Transition(0, 0, 0.5, True, info={"turns": 2})),
    ]
    found = [event for record in encode(events, 1) for event in decode(record)]
    assert found == [
        event._replace(token_ids=list(event.token_ids)) if isinstance(event, Branched) else event for event in events
    ]


def test_no_poll_of_the_engine_walks_the_open_episodes() -> None:
    """Dropping nothing, or one episode, and closing an episode look at no other one."""
    walked: list[int] = []

    class Watched(dict[str, Any]):
        def __iter__(self) -> Any:
            walked.append(len(self))
            return super().__iter__()

        def values(self) -> Any:
            walked.append(len(self))
            return super().values()

    world = Programs(one_after_the_other)
    rollouts = build(world)
    world.episodes._open = Watched()
    batches = asyncio.run(steps_of(rollouts, 2))
    for batch in batches:
        for group in batch.groups:
            check(group, world)
    assert len(walked) == 1, "at the end, `close` ends every open episode"
    assert not world.episodes._open_in
    assert not world.episodes._indices


async def test_beginnings_that_sequences_share_are_stored_once(tmp_path: Path) -> None:
    """A client that leaves out thinking begins a sequence with every turn, which repeats the whole conversation."""
    turns, words = 24, " ".join(str(number % 50) for number in range(40))

    async def forgetful(client: Client) -> float:
        messages: list[Any] = [{"role": "user", "content": words}]
        for turn in range(turns):
            await client.world.episodes.reply(client.start.key, TurnRequest([dict(one) for one in messages]))
            messages += [{"role": "assistant", "content": str(turn)}, {"role": "user", "content": words}]
        return 1.0

    journal = Journal(tmp_path / "journal", flush_seconds=0)
    journal.seek(None)
    sampling = SamplingParams(max_tokens=400, max_turns=99, stop_token_ids=(STOP,))
    alone = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
    rollouts = build(Programs(forgetful), journal=journal, sampling=sampling, context=4000, **alone)
    async with rollouts:
        [group] = (await rollouts.next_batch()).groups
    journal.close()
    assert len(group.samples) == turns
    whole = [len(sample.prompt_ids) for sample in group.samples]
    stored = [len(sample.to_dict()["origin"][2]) for sample in group.samples]
    assert sum(whole) > 10 * sum(stored)
    assert max(stored) < 2 * len(words.split())
    assert len(json.dumps(group.to_dict())) < 100_000
    assert sum(file.stat().st_size for file in (tmp_path / "journal").rglob("*") if file.is_file()) < 100_000
    again = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    assert [sample.prompt_ids for sample in again.samples] == [sample.prompt_ids for sample in group.samples]
