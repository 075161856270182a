"""Requests and trajectories of verl's agent loops, supported and unsupported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from april.integrations.generating_code import CodeEpisode, LeftOutError
from april.integrations.verl.agent_loops import AgentLoops, outputs_of
from april.rollout.episodes.environment import ObservationError
from april.rollout.episodes.turns import AgentStart, EpisodeOver, TurnReply, TurnRequest

SAMPLING = {"temperature": 1.0}
LENGTH = 9
"""Tokens of a response with everything after the prompt."""
NO_IMAGES: Any = SimpleNamespace(places=lambda token_ids: 0)
"""Stands where the encoder is, whose prompts have no images."""


class Worker:
    """Stands where verl's agent-loop worker is, whose loop is a function."""

    tokenizer = SimpleNamespace(eos_token_id=2)
    model_config = SimpleNamespace(hf_config=SimpleNamespace(eos_token_id=[2, 1]), generation_config=None)
    rollout_config = SimpleNamespace(response_length=LENGTH)

    def __init__(self, loop: Callable[..., Any]) -> None:
        self.loop = loop
        self.llm_client: Any = None

    async def _run_agent_loop(self, sampling: dict[str, Any], trajectory: Any, *, trace: bool, **row: Any) -> Any:
        output = await self.loop(self.llm_client, sampling, **row)
        return await self._agent_loop_postprocess(output, False)


class Draws:
    """A policy that draws these responses, each under the next version."""

    def __init__(self, *responses: list[int]) -> None:
        self.responses = responses
        self.requests: list[TurnRequest] = []

    async def reply(self, key: str, request: TurnRequest) -> list[TurnReply]:
        number = len(self.requests)
        self.requests.append(request)
        ids = self.responses[number]
        logprobs = [-float(number + 1)] * len(ids)
        end = "stop" if len(ids) < (request.max_tokens or 0) else "length"
        return [TurnReply(f"turn {number}", {}, (), ids, logprobs, end, [number] * len(ids))]


def output_of(prompt: list[int], response: list[int], mask: list[int], **fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=mask, metrics=AgentLoopMetrics(), extra_fields=fields
    )


async def two_turns(client: Any, sampling: dict[str, Any], **row: Any) -> AgentLoopOutput:
    """A loop that answers a turn with token 9, and ends with the second."""
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    told = [1, 2, *first.token_ids, 9]
    second = await client.generate("a", prompt_ids=told, sampling_params=sampling)
    mask = [1] * len(first.token_ids) + [0] + [1] * len(second.token_ids)
    reasons = [first.stop_reason, second.stop_reason]
    return output_of([1, 2], [*told[2:], *second.token_ids], mask, reasons=reasons, session=row["session_id"])


def loops_of(loop: Callable[..., Any]) -> AgentLoops:
    return AgentLoops(Worker(loop), NO_IMAGES, {"p": {"agent_name": "any"}}, dict(SAMPLING), 99)


async def run(loop: Callable[..., Any], policy: Draws) -> list[AgentLoopOutput]:
    """The trajectories of a loop, after they were kept with the sample."""
    start = AgentStart("april-0.1", {"uid": "p"}, 0, episode=1)
    info = await loops_of(loop)._run(CodeEpisode(policy, start))  # type: ignore[arg-type]
    return outputs_of(SimpleNamespace(transitions=[SimpleNamespace(info=info)]))  # type: ignore[arg-type]


async def test_each_request_of_a_loop_is_a_turn() -> None:
    policy = Draws([5, 6], [7])
    (output,) = await run(two_turns, policy)
    assert (output.prompt_ids, output.response_ids) == ([1, 2], [5, 6, 9, 7])
    assert output.response_mask == [1, 1, 0, 1]
    assert output.response_logprobs == [-1.0, -1.0, 0.0, -2.0]
    fields = output.extra_fields
    assert fields["policy_versions"] == [0, 0, -1, 1]
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (0, 1, 1)
    assert fields["session"] == 1
    assert fields["reasons"] == ["completed", "completed"]
    assert fields["tool_rewards"] == []
    assert [request.max_tokens for request in policy.requests] == [LENGTH, LENGTH - 3]


async def test_a_response_that_uses_up_the_budget_ends_by_its_length() -> None:
    policy = Draws([4] * LENGTH, [7])
    (output,) = await run(two_turns, policy)
    assert output.extra_fields["reasons"] == ["length", "length"]
    assert policy.requests[1].max_tokens == 1, "as verl's replicas, which draw at least one"


async def test_a_loop_may_omit_sampled_tokens() -> None:
    """As verl's builder for GLM does with the token that ends a turn."""

    async def loop(*args: Any, **row: Any) -> AgentLoopOutput:
        output = await two_turns(*args, **row)
        output.response_mask[1] = 0
        return output

    (output,) = await run(loop, Draws([5, 6], [7]))
    assert output.response_mask == [1, 0, 0, 1]


async def summarizes(client: Any, sampling: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
    """A loop that leaves its first prompt out of the second request."""
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    second = await client.generate("a", prompt_ids=[1, 3, *first.token_ids], sampling_params=sampling)
    prompt = [1, 3, *first.token_ids]
    return [
        output_of([1, 2], first.token_ids, [1] * len(first.token_ids)),
        output_of(prompt, second.token_ids, [1] * len(second.token_ids)),
    ]


async def two_at_a_time(client: Any, sampling: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
    prompts = [[1, 2, token] for token in (3, 4)]
    requests = [client.generate("a", prompt_ids=prompt, sampling_params=sampling) for prompt in prompts]
    answers = [answer.token_ids for answer in await asyncio.gather(*requests)]
    return [output_of(prompt, ids, [1] * len(ids)) for prompt, ids in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("loop", [summarizes, two_at_a_time])
async def test_a_loop_may_return_several_trajectories(loop: Any) -> None:
    outputs = await run(loop, Draws([5, 6], [7]))
    assert [output.response_ids for output in outputs] == [[5, 6], [7]]
    assert [output.response_logprobs for output in outputs] == [[-1.0, -1.0], [-2.0]]
    assert [output.extra_fields["policy_versions"] for output in outputs] == [[0, 0], [1]]


async def hotter(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    first = await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    asked = {**sampling, "temperature": 2.0}
    await client.generate("a", prompt_ids=[1, 2, *first.token_ids], sampling_params=asked)


async def with_an_image(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling, image_data=[Image.new("RGB", (8, 8))])


async def other_tokens(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    return output_of([1, 2], [8, 8], [1, 1])


async def trains_on_tools(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    output = await two_turns(client, sampling, **row)
    output.response_mask = [1] * len(output.response_ids)
    return output


async def without_trajectory(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    return []


async def nothing_sampled(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    await client.generate("a", prompt_ids=[1, 2], sampling_params=sampling)
    return output_of([1, 2], [8, 8], [0, 0])


async def no_tool(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    raise LookupError("no such tool")


async def no_json(client: Any, sampling: dict[str, Any], **row: Any) -> Any:
    output = await two_turns(client, sampling, **row)
    output.extra_fields["tool"] = object()
    return output


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (hotter, "requests {'temperature': 2.0} where responses are sampled with"),
        (with_an_image, "has 1 images for 0 ranges of placeholders"),
        (other_tokens, "token 2 of the trajectory"),
        (trains_on_tools, "token 4 of the trajectory .* the policy did not draw it"),
        (without_trajectory, "returned no trajectory"),
        (nothing_sampled, "a response without a token that the policy sampled"),
        (no_tool, "LookupError: no such tool"),
        (no_json, "extra_fields of an agent loop"),
    ],
)
async def test_unsupported_output_leaves_the_group_out_with_a_reason(loop: Any, reason: str) -> None:
    with pytest.raises(LeftOutError, match=reason):
        await run(loop, Draws([5, 6], [7]))


async def test_an_episode_that_is_over_is_no_failure_of_its_loop() -> None:
    class Over(Draws):
        async def reply(self, key: str, request: TurnRequest) -> list[TurnReply]:
            raise EpisodeOver("the episode is left out")

    with pytest.raises(EpisodeOver):
        await run(two_turns, Over())


async def test_tokens_that_stop_a_response_are_the_same_for_all_responses() -> None:
    loops = loops_of(two_turns)
    assert loops.code.episodes.renderer.stop_token_ids == [1, 2], "the model's own"
    loops.adopt({**SAMPLING, "stop_token_ids": [4, 3, 2]})
    assert loops.sampling_params == {**SAMPLING, "stop_token_ids": [2, 3, 4]}
    assert loops.code.episodes.renderer.stop_token_ids == [1, 2, 3, 4]
    loops.adopt({**SAMPLING, "stop_token_ids": [3, 4, 2]})
    with pytest.raises(ObservationError, match="samples all responses of a run alike"):
        loops.adopt({**SAMPLING, "stop_token_ids": [5]})
