"""Requests of verl's agent loops, supported and unsupported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from april import Group, Prompt, Sample, SamplingParams
from april.integrations.verl.agent_loops import AgentLoopEpisode, AgentLoops
from april.rollout.episodes.environment import ObservationError, TokenIds, Turn
from april.rollout.trajectory.transition import Transition

SAMPLING = {"temperature": 1.0}


class Worker:
    """Stands where verl's agent-loop worker is, whose loop is a function."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        self.loop = loop
        self.runs = 0
        self.llm_client: Any = None

    async def _run_agent_loop(self, sampling: dict[str, Any], trajectory: Any, *, trace: bool, **row: Any) -> Any:
        output = await self.loop(self.llm_client, sampling, **row)
        return await self._agent_loop_postprocess(output, False)


def output_of(prompt: list[int], response: list[int], mask: list[int]) -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask, metrics=AgentLoopMetrics())


async def two_turns(client: Any, sampling: dict[str, Any], **row: Any) -> AgentLoopOutput:
    """A loop that answers a turn with token 9, and ends with the second."""
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    told = [1, 2, *first.token_ids, 9]
    second = await client.generate("a", prompt_ids=told, sampling_params=sampling)
    mask = [1] * len(first.token_ids) + [0] + [1] * len(second.token_ids)
    return output_of([1, 2], [*told[2:], *second.token_ids], mask)


def loops_of(loop: Callable[..., Any]) -> AgentLoops:
    return AgentLoops(Worker(loop), {"p": {"agent_name": "any"}}, dict(SAMPLING))


def turn(index: int, *token_ids: int) -> Turn:
    return Turn("0.0", index, "", token_ids)


async def test_requests_are_observations_and_turns_are_answers() -> None:
    playing = AgentLoopEpisode(loops_of(two_turns))
    assert await playing.reset({"agent_name": "any"}, 0) == TokenIds([1, 2])
    step = await playing.step(turn(0, 5, 6))
    assert (step.observation, step.done) == (TokenIds([9]), False)
    assert (await playing.step(turn(1, 7))).done
    output = await playing.end(())
    assert output.response_ids == [5, 6, 9, 7]


async def test_a_loop_may_omit_sampled_tokens() -> None:
    """As verl's builder for GLM does with the token that ends a turn."""

    async def loop(*args: Any, **row: Any) -> AgentLoopOutput:
        output = await two_turns(*args, **row)
        output.response_mask[1] = 0
        return output

    output = await loops_of(loop).output(*finished((5, 6), (7,), told=2))
    assert output.response_mask == [1, 0, 0, 1]


def finished(*turns: tuple[int, ...], told: int) -> tuple[Prompt, Sample]:
    """A sample of `two_turns` with this many answered turns."""
    prompt = Prompt((), "p")
    (sample,) = Group.start(0, prompt, 1, SamplingParams(max_tokens=9, max_turns=99), seed=0).samples
    sample.observe([1, 2], Transition(0, 2))
    for index, token_ids in enumerate(turns):
        sample.extend(token_ids, [-1.0] * len(token_ids), 0)
        if index < told:
            sample.turn_ended = True
            new = [9] if index == 0 else []
            sample.observe(new, Transition(sample.length, len(new), done=not new))
    return prompt, sample


@pytest.mark.parametrize("told", [1, 2])
async def test_a_lost_loop_is_repeated_with_the_same_turns_after_a_restart(told: int) -> None:
    """One that had ended, and one whose last turn ran out of its budget."""
    output = await loops_of(two_turns).output(*finished((5, 6), (7,), told=told))
    assert output.response_ids == [5, 6, 9, 7]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_loop_that_cannot_be_repeated_returns_no_output(fails: bool) -> None:
    async def another_tool(client: Any, sampling: dict[str, Any], **row: Any) -> AgentLoopOutput:
        first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
        if fails:
            raise RuntimeError("the tool has gone")
        told = [1, 2, *first.token_ids, 8]
        second = await client.generate("a", prompt_ids=told, sampling_params=sampling)
        return output_of([1, 2], [*told[2:], *second.token_ids], [1, 1, 0, 1])

    assert await loops_of(another_tool).output(*finished((5, 6), (7,), told=2)) is None


async def test_a_loop_that_exceeds_its_budget_returns_no_output() -> None:
    loops = loops_of(two_turns)
    assert await loops.output(*finished((5, 6), told=0)) is None


async def changes(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    await client.generate("a", prompt_ids=[1, 3, *first.token_ids], sampling_params=sampling)


async def hotter(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    asked = {**sampling, "temperature": 2.0}
    await client.generate("a", prompt_ids=[1, 2, *first.token_ids], sampling_params=asked)


async def two_at_a_time(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    told = [1, 2, *first.token_ids]
    more = [client.generate("a", prompt_ids=[*told, token], sampling_params=sampling) for token in (3, 4)]
    await asyncio.gather(*more)


async def with_an_image(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    told = [1, 2, *first.token_ids, 9]
    await client.generate("a", prompt_ids=told, sampling_params=sampling, image_data=["an image"])


async def other_tokens(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    return output_of([1, 2], [8, 8], [1, 1])


async def trains_on_tools(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    await client.generate("a", prompt_ids=[1, 2, *first.token_ids, 9], sampling_params=sampling)
    return output_of([1, 2], [5, 6, 9, 5, 6], [1, 1, 1, 1, 1])


async def two_trajectories(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    return [output_of([1, 2], [5, 6], [1, 1])] * 2


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (changes, "changes token 1 of the 4 before it"),
        (hotter, "requests {'temperature': 2.0} where turns are sampled with"),
        (two_at_a_time, "a second request before the first was answered"),
        (with_an_image, "has images"),
        (other_tokens, "returned 4 tokens that are not the 4 of its turns"),
        (trains_on_tools, "mask has tokens that no policy sampled"),
        (two_trajectories, "returned a list"),
    ],
)
async def test_unsupported_output_fails_the_sample_with_a_reason(loop: Any, reason: str) -> None:
    playing = AgentLoopEpisode(loops_of(loop))

    async def play() -> None:
        await playing.reset({"agent_name": "any"}, 0)
        await playing.step(turn(0, 5, 6))
        await playing.step(turn(1, 5, 6))

    with pytest.raises(ObservationError, match=reason):
        await play()


async def test_tokens_that_stop_a_turn_are_the_same_for_all_turns() -> None:
    loops = loops_of(two_turns)
    loops.adopt({**SAMPLING, "stop_token_ids": [4, 3]})
    assert loops.sampling_params == {**SAMPLING, "stop_token_ids": [3, 4]}
    loops.adopt({**SAMPLING, "stop_token_ids": [3, 4]})
    with pytest.raises(ObservationError, match="samples all turns of a run alike"):
        loops.adopt({**SAMPLING, "stop_token_ids": [5]})


async def test_loops_of_rejected_groups_are_cancelled() -> None:
    loops = loops_of(two_turns)
    playing = AgentLoopEpisode(loops)
    await playing.reset({"agent_name": "any"}, 0)
    loops.episodes(99).let_go("0.0", playing)
    loops.keep({"0.0"})
    assert not playing._run.cancelled()
    loops.keep(set())
    await asyncio.gather(playing._run, return_exceptions=True)
    assert playing._run.cancelled()
