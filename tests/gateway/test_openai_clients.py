"""OpenAI's own clients, sync and async, take the gateway for OpenAI's API."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.scripted import CLIENTS, CUT, ScriptedPolicy, call, served

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
FLAT_TOOL = {"type": "function", "strict": False, **TOOL["function"]}
ASKED = [{"role": "user", "content": "What is 1 + 2?"}]
TWO_CALLS = call("add", '{"a": 1, "b": 2}') + "\n" + call("add", '{"a": 3, "b": 4}')


def client(access, **settings):
    CLIENTS.append(
        openai.AsyncOpenAI(base_url=access.address + "/v1", api_key=access.secret, max_retries=0, **settings)
    )
    return CLIENTS[-1]


async def test_sync_and_async_clients_get_text_usage_and_log_probabilities():
    policy = ScriptedPolicy(["Three. 中", "Three. 中"])
    asked = {"model": "policy", "messages": ASKED, "logprobs": True}
    async with served(policy) as (_, access):
        sync = openai.OpenAI(base_url=access.address + "/v1", api_key=access.secret)
        answers = [
            await client(access).chat.completions.create(**asked),
            await asyncio.to_thread(sync.chat.completions.create, **asked),
        ]
    for got in answers:
        choice = got.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Three. 中", "stop")
        drawn = choice.logprobs.content
        assert b"".join(bytes(one.bytes) for one in drawn).startswith(b"Three.")
        assert {one.logprob for one in drawn} == {-0.5}
        assert got.usage.completion_tokens == len(drawn)
        assert got.usage.prompt_tokens == len(policy.renderer.render(ASKED))
        assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


async def test_parallel_calls_and_their_results():
    policy = ScriptedPolicy([TWO_CALLS, "Three and seven."])
    async with served(policy) as (_, access):
        chat = client(access).chat.completions
        first = await chat.create(model="policy", messages=ASKED, tools=[TOOL], tool_choice="auto")
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        given = [json.loads(one.function.arguments) for one in message.tool_calls]
        assert given == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert len({one.id for one in message.tool_calls}) == 2
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": str(sum(values.values()))}
            for one, values in zip(message.tool_calls, given, strict=True)
        ]
        second = await chat.create(model="policy", messages=[*ASKED, message, *results], tools=[TOOL])
    assert second.choices[0].message.content == "Three and seven."
    history = policy.last.messages
    assert history[1]["tool_calls"] == policy.histories["0"][-1]["tool_calls"]
    assert [one["content"] for one in history[2:]] == ["3", "7"]


async def test_a_message_with_null_fields_is_the_message_that_was_drawn():
    policy = ScriptedPolicy(["One.", "Two."])
    async with served(policy) as (_, access):
        chat = client(access).chat.completions
        first = await chat.create(model="policy", messages=ASKED)
        sent_back = {**first.choices[0].message.model_dump(), "refusal": None, "audio": None, "function_call": None}
        await chat.create(model="policy", messages=[*ASKED, sent_back, {"role": "user", "content": "More."}])
    assert policy.last.messages[1] == policy.histories["0"][-1]


async def test_streams_of_text_and_of_calls():
    policy = ScriptedPolicy(["<think>\nEasy.\n</think>\n\nThree.", TWO_CALLS])
    async with served(policy) as (_, access):
        chat = client(access).chat.completions
        text, reasoning, usage, reasons = "", "", [], []
        options = {"include_usage": True}
        async for chunk in await chat.create(model="policy", messages=ASKED, stream=True, stream_options=options):
            usage += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert (text, reasoning, reasons) == ("Three.", "Easy.", ["stop"])
        assert [one.prompt_tokens for one in usage] == [len(policy.renderer.render(ASKED))]
        async with chat.stream(model="policy", messages=ASKED, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert [one.function.arguments for one in final.choices[0].message.tool_calls] == [
        '{"a": 1, "b": 2}',
        '{"a": 3, "b": 4}',
    ]
    assert final.choices[0].finish_reason == "tool_calls"


class Sum(BaseModel):
    total: int


async def test_parse_puts_the_schema_into_the_prompt():
    policy = ScriptedPolicy(['{"total": 3}', '{"total": 4}'])
    async with served(policy) as (_, access):
        chat = await client(access).chat.completions.parse(model="policy", messages=ASKED, response_format=Sum)
        response = await client(access).responses.parse(model="policy", input="Add.", text_format=Sum)
    assert chat.choices[0].message.parsed == Sum(total=3)
    assert response.output_parsed == Sum(total=4)
    for request in policy.requests:
        assert request.messages[0]["role"] == "system"
        assert '"total"' in request.messages[0]["content"]


async def test_choices_limits_and_a_cut_turn():
    policy = ScriptedPolicy(["a", "b", "c" + CUT])
    async with served(policy) as (_, access):
        chat = client(access).chat.completions
        two = await chat.create(model="policy", messages=ASKED, n=2)
        cut = await chat.create(model="policy", messages=ASKED, max_completion_tokens=5)
    assert [one.message.content for one in two.choices] == ["a", "b"]
    assert two.usage.completion_tokens == 4
    assert cut.choices[0].finish_reason == "length"
    assert policy.last.max_tokens == 5


@pytest.mark.parametrize("stop", ["Obs", ["never", "Observation:"]])
async def test_a_stop_string_ends_a_turn(stop):
    policy = ScriptedPolicy(["Look.\nObservation: 3"] * 2)
    async with served(policy) as (_, access):
        chat = client(access).chat.completions
        cut = await chat.create(model="policy", messages=ASKED, stop=stop)
        chunks = [chunk async for chunk in await chat.create(model="policy", messages=ASKED, stop=stop, stream=True)]
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Look.\n", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Look.\n"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_roles_parts_and_settings_without_effect(caplog):
    policy = ScriptedPolicy(["a", "b"] * 2)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "me"}]
    async with served(policy) as (_, access):
        for _ in range(2):
            await client(access).chat.completions.create(
                model="policy",
                messages=messages,
                temperature=0.3,
                presence_penalty=0.5,
                reasoning_effort="low",
                user="me",
                parallel_tool_calls=False,
            )
            await client(access).chat.completions.create(model="policy", messages=messages, parallel_tool_calls=True)
    assert policy.last.messages == [{"role": "system", "content": "Be brief."}, *ASKED]
    said = [record.message for record in caplog.records if "no effect" in record.message]
    assert sorted(said) == [
        f"requests of programs set {name}, which has no effect: the recipe decides"
        for name in ("parallel_tool_calls", "presence_penalty", "reasoning_effort", "temperature")
    ]


@pytest.mark.parametrize("own", [True, False])
async def test_a_setting_decides_about_the_temperature_of_a_request(own):
    policy = ScriptedPolicy(["a", "b", "c", "d", "e"])
    async with served(policy, own_temperature=own) as (_, access):
        openai_client = client(access)
        chat = openai_client.chat.completions
        await chat.create(model="policy", messages=ASKED, temperature=0.3, top_p=1, extra_body={"top_k": -1})
        await openai_client.responses.create(model="policy", input="x", temperature=0)
        await chat.create(model="policy", messages=ASKED)
        if own:
            with pytest.raises(openai.BadRequestError, match=r"'top_p'.*cannot truncate") as refused:
                await chat.create(model="policy", messages=ASKED, top_p=0.9)
            assert refused.value.code == "unsupported_parameter"
            with pytest.raises(openai.BadRequestError, match="Invalid 'temperature': expected a number from 0 to 2"):
                await chat.create(model="policy", messages=ASKED, temperature=3)
            with pytest.raises(openai.BadRequestError, match=r"expected 0, or a number from 0\.01 to 2, got 0\.005"):
                await chat.create(model="policy", messages=ASKED, temperature=0.005)
        else:
            await chat.create(model="policy", messages=ASKED, top_p=0.9)
    taken = [request.temperature for request in policy.requests[:3]]
    assert taken == ([0.3, 0.0, None] if own else [None] * 3)


async def test_tools_of_the_provider_are_left_out(caplog):
    policy = ScriptedPolicy(["a", "b", "c"])
    custom = {"type": "custom", "custom": {"name": "patch"}}
    async with served(policy) as (_, access):
        await client(access).chat.completions.create(model="policy", messages=ASKED, tools=[custom, TOOL])
        for _ in range(2):
            answer = await client(access).responses.create(
                model="policy",
                input="x",
                tools=[FLAT_TOOL, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
                tool_choice="required",
                parallel_tool_calls=False,
            )
    assert [[one["function"]["name"] for one in request.tools] for request in policy.requests] == [["add"]] * 3
    assert ([one.name for one in answer.tools], answer.tool_choice, answer.parallel_tool_calls) == (
        ["add"],
        "required",
        False,
    )
    said = [record.message for record in caplog.records if "does not get" in record.message]
    assert said == [
        'requests of programs offer tools of the type "custom", which the policy does not get',
        'requests of programs offer tools of the type "web_search", which the policy does not get',
    ]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", "Call a tool"),
        ("none", "Do not call a tool"),
        ({"type": "function", "function": {"name": "add"}}, "Call the tool add"),
    ],
)
async def test_a_forced_choice_acts_through_the_prompt(choice, text):
    policy = ScriptedPolicy(["a"])
    async with served(policy) as (_, access):
        await client(access).chat.completions.create(model="policy", messages=ASKED, tools=[TOOL], tool_choice=choice)
    assert text in policy.last.messages[0]["content"]


async def test_responses_with_tools_and_a_previous_response():
    policy = ScriptedPolicy(["<think>\nCall.\n</think>\n\n" + TWO_CALLS, "Three.", "Bye.", TWO_CALLS, '{"total": 3}'])
    async with served(policy) as (_, access):
        responses = client(access).responses
        first = await responses.create(
            model="policy", input="What is 1 + 2?", instructions="Be brief.", tools=[FLAT_TOOL], store=True
        )
        reasoning, *calls = first.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Call.")
        assert [one.name for one in calls] == ["add", "add"]
        outputs = [{"type": "function_call_output", "call_id": one.call_id, "output": "3"} for one in calls]
        second = await responses.create(
            model="policy",
            instructions="Be brief.",
            input=[
                {"role": "user", "content": "What is 1 + 2?"},
                *(one.model_dump() for one in first.output),
                *outputs,
            ],
            tools=[FLAT_TOOL],
        )
        assert second.output_text == "Three."
        assert second.usage.output_tokens > 0
        assert policy.last.messages[2] == policy.histories["0"][-1]
        third = await responses.create(model="policy", input="Thanks.", previous_response_id=second.id)
        assert third.output_text == "Bye."
        assert policy.last.parent == "1"
        assert policy.last.messages == [{"role": "user", "content": "Thanks."}]
        assert policy.last.system is None
        more = {"model": "policy", "input": "More.", "previous_response_id": third.id}
        await responses.create(**more, instructions="Be long.", tools=[FLAT_TOOL], tool_choice="required")
        assert policy.last.system == "Be long.\n\nCall a tool in your next turn."
        await responses.parse(**more, text_format=Sum)
        assert '"total"' in (policy.last.system or "")


async def test_streams_of_responses():
    policy = ScriptedPolicy(["<think>\nEasy.\n</think>\n\nThree.", TWO_CALLS, "cut" + CUT])
    async with served(policy) as (_, access):
        responses = client(access).responses
        async with responses.stream(model="policy", input="What is 1 + 2?") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Three."
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert "response.reasoning_text.delta" in kinds
        numbers = []
        async for event in await responses.create(model="policy", input="x", tools=[FLAT_TOOL], stream=True):
            numbers.append(event.sequence_number)
            last = event
        assert numbers == list(range(len(numbers)))
        assert [one.arguments for one in last.response.output] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
        cut = await responses.create(model="policy", input="x", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_models():
    async with served(ScriptedPolicy([]), models=("policy", "small")) as (_, access):
        assert [model.id async for model in client(access).models.list()] == ["policy", "small"]
        assert (await client(access).models.retrieve("small")).id == "small"
        with pytest.raises(openai.NotFoundError):
            await client(access).models.retrieve("other")


async def test_a_client_waits_while_the_policy_is_trained():
    """Streams get comments, other responses white space, so that a client with a short time limit does not give up."""
    policy = ScriptedPolicy(["One.", "Two."])
    policy.open.clear()
    async with served(policy, keep_alive=0.05) as (_, access):
        chat = client(access, timeout=0.5).chat.completions
        waiting = asyncio.create_task(_collected(chat.create(model="policy", messages=ASKED, stream=True)))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        policy.open.set()
        assert await waiting == "One."


async def test_a_stream_of_a_response_brings_events_while_it_waits():
    """Codex gives up a stream without events, whatever comments it contains."""
    policy = ScriptedPolicy(["One.", "Two.", "Three."])
    policy.open.clear()
    async with served(policy, keep_alive=0.02) as (_, access):
        responses = client(access).responses
        events = []
        async for event in await responses.create(model="policy", input="x", stream=True):
            events.append(event)
            if len(events) == 5:
                policy.open.set()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:5]] == ["response.created", *["response.in_progress"] * 4]
        assert sum(event.type == "response.created" for event in events) == 1
        assert events[-1].response.output_text == "One."
        assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
        policy.open.clear()
        async with responses.stream(model="policy", input="y", previous_response_id=events[0].response.id) as stream:
            kinds = []
            async for event in stream:
                kinds.append(event.type)
                if len(kinds) == 3:
                    policy.open.set()
            assert (await stream.get_final_response()).output_text == "Two."
    assert policy.histories["1"][0] == {"role": "user", "content": "x"}


async def test_a_response_that_is_no_stream_waits_too(monkeypatch):
    monkeypatch.setattr("april.gateway.server.PATIENCE", 0.05)
    policy = ScriptedPolicy(["One."])
    policy.open.clear()
    async with served(policy, keep_alive=0.05) as (_, access):
        waiting = asyncio.create_task(
            client(access, timeout=0.5).chat.completions.create(model="policy", messages=ASKED)
        )
        await asyncio.sleep(1.0)
        assert not waiting.done()
        policy.open.set()
        assert (await waiting).choices[0].message.content == "One."


async def _collected(created) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in await created])
