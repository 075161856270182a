"""Limits, failures and recovery of programs that drive episodes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from april import Chunk, EnvironmentLost, FinishReason, Group, Prompt, RolloutScheduler, SamplingParams
from april.rollout.buffer import Buffer, Rejection
from april.rollout.episodes.environment import ObservationError, Unrewarded
from april.rollout.episodes.episodes import EpisodeError
from april.rollout.episodes.known_episodes import KnownEpisodes
from april.rollout.episodes.turns import AgentOutcome, BadTurn, EpisodeOver, Stopping, TurnRequest
from april.rollout.journal.journal import Journal
from april.rollout.journal.records import decode
from april.rollout.params import EpisodeLimits
from april.training.episode_reward import EpisodeRewards
from tests.branching import Client, Programs, WordRenderer, one_after_the_other
from tests.rollout.test_agent_episodes import CONTEXT, build, check

LIMITS: dict[str, Any] = {"retry_delay": 0.0}
ALONE: dict[str, Any] = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 2}
Q = {"role": "user", "content": "1"}


async def first_group(rollouts: RolloutScheduler) -> Group:
    async with rollouts:
        return (await asyncio.wait_for(rollouts.next_batch(), 30)).groups[0]


async def endless(client: Client) -> float:
    messages: list[Any] = [client.user()]
    while True:
        [reply] = await client.ask(messages)
        messages += [reply.message, client.user()]


async def test_the_limit_of_turns_ends_an_episode() -> None:
    world = Programs(endless)
    sampling = SamplingParams(max_tokens=300, max_turns=4, stop_token_ids=(0,))
    group = await first_group(build(world, EpisodeLimits(**LIMITS), sampling=sampling, **ALONE))
    assert [sample.turns for sample in group.samples] == [4, 4]
    assert {sample.finish for sample in group.samples} == {FinishReason.TURNS}
    assert world.alive == 0


async def test_the_time_limit_counts_only_the_time_that_the_program_uses() -> None:
    """Training holds a turn for longer than the limit; then the program takes too long itself."""
    held = asyncio.Event()

    async def slow(client: Client) -> float:
        await client.ask([Q])
        held.set()
        await asyncio.sleep(60)
        return 1.0

    world = Programs(slow)
    rollouts = build(world, EpisodeLimits(deadline=0.2, **LIMITS), **ALONE)
    async with rollouts:
        batch = asyncio.create_task(rollouts.next_batch())
        while not rollouts.in_flight:
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        await asyncio.sleep(0.5)
        assert not held.is_set()
        assert all(sample.finish is None for sample in rollouts.buffer.samples), "the held time does not count"
        [group] = (await asyncio.wait_for(rollouts.next_batch(), 30)).groups
    assert held.is_set()
    assert {sample.finish for sample in group.samples} == {FinishReason.DEADLINE}
    assert world.alive == 0


@pytest.mark.parametrize("on_error", ["end", "reject"])
async def test_a_program_that_fails_costs_its_own_episode(on_error: Any) -> None:
    async def failing(client: Client) -> float:
        await client.ask([Q])
        if client.start.key.endswith(".1") and (on_error == "end" or client.start.key in ("0.1", "1.1")):
            raise ObservationError("out of order", {"stderr": "a line"})
        return 1.0

    limits = EpisodeLimits(on_error=on_error, **LIMITS)
    rollouts = build(Programs(failing), limits, **{**ALONE, "over_sampling_batch_size": 4})
    group = await first_group(rollouts)
    if on_error == "end":
        assert [(sample.finish, sample.reward) for sample in group.samples] == [("done", 1.0), ("failed", 0.0)]
        assert group.samples[1].transitions[-1].info["stderr"] == "a line"
    else:
        assert group.id >= 2
        assert rollouts.buffer.rejected[Rejection.ENVIRONMENT].groups >= 1


@pytest.mark.parametrize("on_error", ["observe", "end"])
@pytest.mark.parametrize("ends", [Unrewarded("no verdict"), EnvironmentLost("gone"), float("nan"), {"note": {1}}])
async def test_an_episode_without_a_reward_is_not_trained_with_reward_0(ends: Any, on_error: Any) -> None:
    async def script(client: Client) -> Any:
        await client.ask([Q])
        if client.start.key != "0.1":
            return 1.0
        if isinstance(ends, Exception):
            raise ends
        return AgentOutcome(1.0, ends) if isinstance(ends, dict) else ends

    limits = EpisodeLimits(on_error=on_error, max_retries=1, **LIMITS)
    rollouts = build(Programs(script), limits, **{**ALONE, "rollout_batch_size": 2, "over_sampling_batch_size": 2})
    async with rollouts:
        groups = (await asyncio.wait_for(rollouts.next_batch(), 30)).groups
    assert {group.id for group in groups} == {1, 2}
    assert {sample.reward for group in groups for sample in group.samples} == {1.0}
    assert rollouts.buffer.rejected[Rejection.ENVIRONMENT].groups == 1


async def test_programs_that_all_end_without_a_request_end_the_step() -> None:
    async def silent(client: Client) -> float:
        return 1.0

    world = Programs(silent)
    rollouts = build(world, EpisodeLimits(max_retries=1, **LIMITS), **ALONE)
    with pytest.raises(EpisodeError, match="ended before it asked for a turn"):
        await first_group(rollouts)
    assert set(world.runs.values()) == {2}


async def test_another_program_takes_over_where_one_was_lost() -> None:
    lost: set[str] = set()

    async def script(client: Client) -> float:
        [first] = await client.ask([Q])
        [second] = await client.ask([Q, first.message, Q])
        if client.start.key not in lost:
            lost.add(client.start.key)
            raise EnvironmentLost("gone")
        await client.ask([Q, first.message, Q, second.message, Q])
        return 1.0

    world = Programs(script)
    rollouts = build(world, EpisodeLimits(**LIMITS), **ALONE)
    group = await first_group(rollouts)
    check(group, world)
    assert [sample.turns for sample in group.samples] == [3, 3], "nothing was drawn twice"
    assert set(world.runs.values()) == {2}


@pytest.mark.parametrize("script", ["other", "shorter"])
async def test_a_program_that_does_something_else_begins_again(script: str) -> None:
    ran: set[str] = set()

    async def changing(client: Client) -> float:
        key, again = client.start.key.partition("~")[0], client.start.again
        [first] = await client.ask([Q])
        if not again or script == "other":
            await client.ask([Q, first.message, {"role": "user", "content": "7" if again else "8"}])
        if key not in ran:
            ran.add(key)
            raise EnvironmentLost("gone")
        return 1.0

    world = Programs(changing)
    rollouts = build(world, EpisodeLimits(**LIMITS), **ALONE)
    group = await first_group(rollouts)
    check(group, world)
    assert [sample.attempt for sample in group.samples] == [1, 1]
    assert rollouts.buffer.restarted.groups == 2
    rollouts.buffer.check()


async def test_requests_beyond_the_cap_wait() -> None:
    most = 0

    async def wide(client: Client) -> float:
        nonlocal most
        asked = [client.ask([{"role": "user", "content": str(number)}]) for number in range(6)]
        done = asyncio.gather(*asked)
        while not done.done():
            most = max(most, sum(id.startswith(f"{client.start.key.partition('.')[0]}.") for id in engine.flight))
            await asyncio.sleep(0)
        await done
        return 1.0

    world = Programs(wide)
    rollouts = build(world, EpisodeLimits(parallel_turns=2, **LIMITS), slots=12, **{**ALONE, "n_samples_per_prompt": 1})
    engine: Any = rollouts.engine
    group = await first_group(rollouts)
    assert len(group.samples) == 6
    assert most == 2


async def test_wrong_and_late_requests_are_refused_and_the_episode_continues() -> None:
    refused: list[Any] = []

    async def clumsy(client: Client) -> float:
        reply = client.world.episodes.reply
        key = client.start.key
        for request in (
            TurnRequest([]),
            TurnRequest([Q], parent="nothing"),
            TurnRequest([{"role": "user", "content": "1 " * (CONTEXT + 1)}]),
            TurnRequest([{"role": "user", "content": "no number"}]),
            TurnRequest([{"role": "user", "content": "1", "extra": {1, 2}}]),
        ):
            with pytest.raises(BadTurn) as error:
                await reply(key, request)
            refused.append(error.value)
        await client.ask([Q])
        return 1.0

    world = Programs(clumsy)
    rollouts = build(world, EpisodeLimits(**LIMITS), **{**ALONE, "n_samples_per_prompt": 1})
    group = await first_group(rollouts)
    check(group, world)
    assert [error.code for error in refused][2] == "context_length_exceeded"
    assert "cannot be rendered" in str(refused[3])
    with pytest.raises(EpisodeOver):
        await world.episodes.reply("0.0", TurnRequest([Q]))


async def test_a_program_that_outlives_april_continues(tmp_path: Path) -> None:
    """It repeats the request that got no answer."""
    wake = asyncio.Event()
    rewards: dict[str, float] = {}

    async def elsewhere(client: Client) -> float:
        await wake.wait()
        return rewards[client.start.key]

    async def ask_until_answered(world: Programs, key: str, request: TurnRequest) -> Any:
        """Ask again only where april says that it stops: nothing else may reach a program that outlives it."""
        while True:
            try:
                return await world.episodes.reply(key, request)
            except Stopping:
                await asyncio.sleep(0.01)

    async def program(world: Programs, key: str, checkpoint: Callable[[], Awaitable[None]]) -> list[Any]:
        messages, replies = [Q], []
        for turn in range(3):
            if turn == 2:
                await checkpoint()
            [reply] = await ask_until_answered(world, key, TurnRequest(list(messages)))
            replies.append(reply)
            messages += [reply.message, Q]
        rewards[key] = 0.5
        wake.set()
        return replies

    world = Programs(elsewhere)
    own: dict[str, Any] = {**ALONE, "n_samples_per_prompt": 1}
    journal = Journal(tmp_path / "journal", flush_seconds=0)
    before = build(world, EpisodeLimits(**LIMITS), journal=journal, **own)
    reached = asyncio.Event()

    async def crash() -> None:
        reached.set()
        await asyncio.sleep(0.05)

    playing = asyncio.create_task(program(world, "0.0", crash))
    batch = asyncio.create_task(before.next_batch())
    await reached.wait()
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    await before.__aexit__()
    journal.close()

    journal = Journal(tmp_path / "journal", flush_seconds=0)
    journal.seek(None)
    after = build(world, EpisodeLimits(**LIMITS), journal=journal, **own)
    group = await first_group(after)
    replies = await playing
    journal.close()
    [sample] = group.samples
    assert (sample.turns, sample.reward, sample.attempt) == (3, 0.5, 0)
    assert [list(reply.token_ids) for reply in replies] == [list(sample.turn_ids(turn)) for turn in range(3)]


async def test_requests_in_mid_turn_are_answered_right_after_a_resume(tmp_path: Path) -> None:
    """Each sequence of the episode was in mid-turn; the program begins before a turn has ended."""
    ended: list[bool] = []

    async def elsewhere(client: Client) -> float:
        ended.append(any(sample.turn_ended for sample in current[-1].buffer.samples))
        await asyncio.Event().wait()
        return 1.0

    world = Programs(elsewhere)
    own: dict[str, Any] = {**ALONE, "n_samples_per_prompt": 1}

    current: list[RolloutScheduler] = []

    async def asked(rollouts: RolloutScheduler, until: Callable[[], bool]) -> asyncio.Task[Any]:
        """Ask for a turn before april has begun, and cancel the step once `until` holds."""
        current.append(rollouts)
        asking = asyncio.create_task(world.episodes.reply("0.0", TurnRequest([Q])))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        batch = asyncio.create_task(rollouts.next_batch())
        while not until():
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        return asking

    journal = Journal(tmp_path / "journal", flush_seconds=0)
    before = build(world, EpisodeLimits(**LIMITS), journal=journal, **own)
    first = await asked(before, lambda: any(sample.length for sample in before.buffer.samples))
    assert not any(sample.turn_ended for sample in before.buffer.samples)
    await before.__aexit__()
    with pytest.raises(Stopping):
        await first
    with pytest.raises(Stopping):
        await world.episodes.reply("7.0", TurnRequest([Q]))
    journal.close()

    journal = Journal(tmp_path / "journal", flush_seconds=0)
    journal.seek(None)
    after = build(world, EpisodeLimits(**LIMITS), journal=journal, **own)
    second = await asked(after, lambda: world.runs["0.0"] > 1)
    assert ended == [False, False]
    batch = asyncio.create_task(after.next_batch())
    [reply] = await asyncio.wait_for(second, 30)
    [sample] = after.buffer.samples
    assert list(reply.token_ids) == list(sample.turn_ids(0))
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    await after.__aexit__()
    journal.close()


async def test_the_buffer_decides_whether_a_request_is_too_late() -> None:
    """Requests for episodes that ended before a crash are refused at once; those that may begin again wait."""
    buffer, known = Buffer(), KnownEpisodes()
    for id in range(3):
        buffer.admit(Group.start(id, Prompt((1,), "p"), 2, SamplingParams(max_tokens=8, max_turns=2), 0))
    buffer.reject(buffer.groups[0], Rejection.FILTER)
    known.buffer = lambda: buffer
    buffer.groups[1].samples[0].attempt = 1
    buffer.groups[1].samples[1].finish = FinishReason.DONE
    for late in ("0.0", "1.0", "1.1"):
        with pytest.raises(EpisodeOver):
            await known.episode(late)
    early = [asyncio.create_task(known.episode(key)) for key in ("1.0~1", "2.1", "3.0")]
    await asyncio.sleep(0)
    buffer.reject(buffer.groups[2], Rejection.FILTER)
    known.stop()
    results = await asyncio.gather(*early, return_exceptions=True)
    assert [type(result) for result in results] == [Stopping, EpisodeOver, Stopping]


async def test_an_episode_that_cannot_be_restored_costs_its_own_group(tmp_path: Path) -> None:
    world = Programs(one_after_the_other)
    own: dict[str, Any] = {**ALONE, "over_sampling_batch_size": 2, "max_staleness": 1}
    hopeless: set[int] = set()

    class Partly(WordRenderer):
        """Raises an error at the turns of some groups."""

        def parse(self, turn_ids: Any, tools: Any = (), node_id: str = "", stop: Any = None) -> Any:
            if int(node_id.partition(".")[0]) in hopeless:
                raise RecursionError("too deep")
            return super().parse(turn_ids, tools, node_id, stop)

    for broken in (False, True):
        journal = Journal(tmp_path / "journal", flush_seconds=0)
        journal.seek(None)
        rollouts = build(world, EpisodeLimits(**LIMITS), journal=journal, **own)
        if broken:
            world.episodes.renderer = Partly()
        batch = asyncio.create_task(rollouts.next_batch())
        if broken:
            [group] = (await asyncio.wait_for(batch, 30)).groups
            assert group.id not in hopeless
            assert rollouts.buffer.rejected[Rejection.ENVIRONMENT].groups == len(hopeless)
        else:
            while not any(sample.turns for sample in rollouts.buffer.samples):
                await asyncio.sleep(0)
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
        await rollouts.__aexit__()
        journal.close()
        begun = [group.id for group in rollouts.buffer if any(sample.turns for sample in group.samples)]
        hopeless |= {*begun[:1]}
        assert broken or hopeless


async def test_recovery_restart_begins_every_open_episode_again(tmp_path: Path) -> None:
    world = Programs(one_after_the_other)
    limits = EpisodeLimits(recovery="restart", **LIMITS)
    for last in (False, True):
        journal = Journal(tmp_path / "journal", flush_seconds=0)
        journal.seek(None)
        rollouts = build(world, limits, journal=journal, **ALONE)
        batch = asyncio.create_task(rollouts.next_batch())
        if not last:
            while not any(sample.length for sample in rollouts.buffer.samples):
                await asyncio.sleep(0)
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
        else:
            [group] = (await asyncio.wait_for(batch, 30)).groups
            check(group, world)
            assert max(sample.attempt for sample in group.samples) == 1
        await rollouts.__aexit__()
        journal.close()


async def test_a_program_that_outlived_april_may_begin_with_another_conversation() -> None:
    """It asks for a sub-agent's turn first, then continues where it was, and asks again for nothing it has."""
    left: dict[str, Any] = {}

    async def survivor(client: Client) -> float:
        key = client.start.key
        if key not in left:
            [first] = await client.ask([Q])
            await client.ask([{"role": "user", "content": "2"}])
            left[key] = first
            raise EnvironmentLost("gone")
        await client.ask([{"role": "user", "content": "3"}])
        await client.world.episodes.reply(key, TurnRequest([Q, left[key].message, Q]))
        return 1.0

    world = Programs(survivor, outlive=True)
    rollouts = build(world, EpisodeLimits(**LIMITS), **ALONE)
    group = await first_group(rollouts)
    check(group, world)
    assert [sample.attempt for sample in group.samples] == [0] * 6, "three sequences in each of two episodes"
    assert rollouts.buffer.restarted.groups == 0


@pytest.mark.parametrize("continued", [True, False])
async def test_a_program_that_never_asks_again_says_that_it_has_continued(continued: bool) -> None:
    ran: set[str] = set()

    async def silent(client: Client) -> Any:
        name = client.start.key.partition("~")[0]
        if name in ran and "~" not in client.start.key:
            return AgentOutcome(1.0, continued=continued)
        await client.ask([Q])
        if name not in ran:
            ran.add(name)
            raise EnvironmentLost("gone")
        return 1.0

    rollouts = build(Programs(silent, outlive=True), EpisodeLimits(**LIMITS), **ALONE)
    group = await first_group(rollouts)
    assert [sample.attempt for sample in group.samples] == [int(not continued)] * 2


async def test_a_request_repeated_under_another_key_after_a_crash_gets_its_turn() -> None:
    """Some clients choose idempotency keys at random: the second program has others."""

    async def script(client: Client) -> float:
        run = client.world.runs[client.start.key]
        [first] = await client.ask([Q], key=f"random {run}")
        [same] = await client.ask([Q], key=f"random {run}")
        assert same.node_id == first.node_id
        [other] = await client.ask([Q, first.message, Q], key=f"second {run}")
        if run == 1:
            raise EnvironmentLost("gone")
        [new] = await client.ask([Q, first.message, Q], key="new")
        assert new.node_id != other.node_id
        return 1.0

    world = Programs(script)
    rollouts = build(world, EpisodeLimits(**LIMITS), **ALONE)
    group = await first_group(rollouts)
    check(group, world)
    assert rollouts.buffer.restarted.groups == 0
    assert sum(len(sample.transitions) - 1 for sample in group.samples) == 6, "three turns in each episode"


@pytest.mark.parametrize("n", [1, 2])
async def test_requests_with_one_key_that_wait_for_a_slot_are_one(n: int) -> None:
    async def script(client: Client) -> float:
        twice = [client.ask([Q], key="k", n=n) for _ in range(2)]
        first, second = (
            {reply.node_id for reply in replies}
            for replies in (await asyncio.gather(client.ask([{"role": "user", "content": "9"}]), *twice))[1:]
        )
        assert first == second
        return 1.0

    world = Programs(script)
    rollouts = build(world, EpisodeLimits(parallel_turns=1, **LIMITS), **{**ALONE, "n_samples_per_prompt": 1})
    group = await first_group(rollouts)
    check(group, world)
    assert len(group.samples) == 1 + n


async def test_the_turns_of_a_reward_are_those_of_all_sequences() -> None:
    async def script(client: Client) -> float:
        [first] = await client.ask([Q])
        await client.ask([{"role": "user", "content": "2"}])
        await client.ask([Q, first.message, Q])
        return 1.0

    group = await first_group(build(Programs(script), EpisodeLimits(**LIMITS), **ALONE))
    rewards = [await EpisodeRewards()(group.prompt, sample) for sample in group.outcomes]
    assert [(reward.value, reward.info["turns"]) for reward in rewards] == [(1.0, 3)] * 2


async def test_no_two_evaluations_have_the_same_keys() -> None:
    """A request for an episode of an earlier evaluation must not reach one of a later evaluation."""

    async def once(client: Client) -> float:
        await client.ask([Q])
        return 1.0

    world = Programs(once)
    rollouts = build(world, EpisodeLimits(**LIMITS), **ALONE)
    async with rollouts:
        for _ in range(2):
            for group in await rollouts.evaluate([Prompt((1,), "p")], 2):
                check(group, world)
    assert len(world.runs) == 4
    assert set(world.runs.values()) == {1}
    for key in world.runs:
        assert re.fullmatch(r"[A-Za-z0-9._~-]+", key), "a key is part of an address"
        with pytest.raises(EpisodeOver):
            await world.episodes.reply(key, TurnRequest([Q]))


class SlowDisk(Journal):
    """Takes its time for each write, and notes the tokens that it has written."""

    def commit(self, records: Any) -> None:
        time.sleep(0.01)
        super().commit(records)
        for event in (event for record in records for event in decode(record)):
            if isinstance(event, Chunk):
                self.written.setdefault(event.sample_id, []).extend(event.token_ids)

    written: dict[str, list[int]]


async def test_a_reply_is_seen_only_once_its_tokens_are_on_disk(tmp_path: Path) -> None:
    """Otherwise a program could act on a turn that a crash replaces by another one."""
    seen = 0

    async def watching(client: Client) -> float:
        nonlocal seen
        messages: list[Any] = [client.user()]
        for _ in range(4):
            [reply] = await client.ask(messages)
            written = journal.written.get(reply.node_id.partition("/")[0], [])
            drawn = list(reply.token_ids)
            assert written[len(written) - len(drawn) :] == drawn
            seen += 1
            messages += [reply.message, client.user()]
        return 1.0

    journal = SlowDisk(tmp_path / "journal", flush_seconds=0)
    journal.written = {}
    journal.seek(None)
    world = Programs(watching)
    group = await first_group(build(world, EpisodeLimits(**LIMITS), journal=journal, **ALONE))
    journal.close()
    assert not world.wrong, world.wrong[0]
    assert seen == 8
    assert {sample.finish for sample in group.samples} == {FinishReason.DONE}
