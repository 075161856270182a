"""Concurrent reward functions: functions that return at once, and functions that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.rollout.rewards import RewardTasks, check_rewards
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample


def finished(id: int) -> Group:
    group = Group.start(id, Prompt((1, 2), str(id)), 2, SamplingParams(max_tokens=4), seed=0)
    for sample in group.samples:
        sample.extend([5], [-1.0], 0, FinishReason.STOP)
    return group


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
@settings(deadline=None)
def test_each_group_is_scored_once_and_independently(waits: list[int], data: st.DataObject) -> None:
    """A group's function returns at once, or after this many turns of the event loop."""
    forgotten = data.draw(st.sets(st.sampled_from(range(len(waits))))) if waits else set()

    async def run() -> None:
        begun: list[int] = []
        released = asyncio.Event()
        within: dict[int, asyncio.Task[None] | None] = {}

        async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
            number = int(prompt.id)
            begun.append(number)
            within[number] = asyncio.current_task()
            if waits[number]:
                await released.wait()
            for _ in range(waits[number]):
                await asyncio.sleep(0)
            assert asyncio.current_task() is within[number], "a function runs in one task from its beginning to its end"
            return [float(number)] * len(samples)

        tasks = RewardTasks(reward, "group")
        groups = [finished(id) for id in range(len(waits))]
        for group in groups:
            tasks.finished(group, group.samples[-1])
        for id in forgotten:
            tasks.forget(groups[id])
        expected = set(range(len(waits))) - forgotten
        assert len(tasks) == len(expected)
        while len(begun) < len(expected):
            await asyncio.sleep(0)
        at_once = {id for id in expected if not waits[id]}
        assert len(tasks) == len(expected) - len(at_once), "all have begun, though some wait for ever"
        tasks.missing(groups[id] for id in expected)
        assert len(tasks) == len(expected) - len(at_once), "what is scored, or was, is not scored again"
        released.set()
        verdicts = tasks.take()
        while tasks:
            await tasks.wait()
            verdicts += tasks.take()
        verdicts += tasks.take()
        assert sorted(verdict.group.id for verdict in verdicts) == sorted(expected)
        assert all(reward.value == verdict.group.id for verdict in verdicts for reward in verdict.rewards)
        assert sorted(begun) == sorted(expected)

    asyncio.run(run())


@pytest.mark.asyncio
async def test_groups_with_a_cancelled_reward_are_scored_again() -> None:
    calls = 0

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls <= 2:
            await asyncio.Event().wait()
        return [1.0] * len(samples)

    tasks, groups = RewardTasks(reward, "group"), [finished(id) for id in range(3)]
    for group in groups:
        tasks.finished(group, group.samples[-1])
    while calls < 2:
        await asyncio.sleep(0)
    await tasks.close()
    assert not tasks
    assert not tasks.take()
    tasks.missing(groups)
    while tasks:
        await tasks.wait()
        await asyncio.sleep(0)
    assert sorted(verdict.group.id for verdict in tasks.take()) == [0, 1, 2]


@pytest.mark.parametrize("returned", [b"12", bytearray(b"12"), "12", {"a": 1, "b": 2}, {1, 2}, 3, None, "x" * 10_000])
def test_an_invalid_sequence_of_rewards_is_refused_in_one_short_line(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"^the reward function returned .{1,80} where 2 rewards were expected$"):
        check_rewards(returned, 2)
