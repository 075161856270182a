"""Anthropic's own clients, sync and async, take the gateway for Anthropic's API."""

import asyncio

import anthropic
import pytest

from tests.gateway.scripted import CLIENTS, CUT, ScriptedPolicy, served
from tests.gateway.test_openai_clients import TWO_CALLS

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
ASKED = [{"role": "user", "content": "What is 1 + 2?"}]


def client(access):
    CLIENTS.append(anthropic.AsyncAnthropic(base_url=access.address, api_key=access.secret, max_retries=0))
    return CLIENTS[-1]


async def test_sync_and_async_clients_get_text_and_usage():
    policy = ScriptedPolicy(["Three.", "Three." + CUT])
    asked = {"model": "policy", "max_tokens": 9, "system": "Be brief.", "messages": ASKED}
    async with served(policy) as (_, access):
        sync = anthropic.Anthropic(base_url=access.address, api_key=access.secret)
        whole = await client(access).messages.create(**asked)
        cut = await asyncio.to_thread(sync.messages.create, **asked)
    assert [block.text for block in whole.content] == [block.text for block in cut.content] == ["Three."]
    assert (whole.stop_reason, cut.stop_reason) == ("end_turn", "max_tokens")
    assert whole.usage.input_tokens == len(policy.renderer.render(policy.last.messages))
    assert whole.usage.output_tokens == cut.usage.output_tokens + 1
    assert policy.last.messages == [{"role": "system", "content": "Be brief."}, *ASKED]
    assert policy.last.max_tokens == 9


async def test_thinking_and_tools_over_two_turns():
    policy = ScriptedPolicy(["<think>\nCall.\n</think>\n\n" + TWO_CALLS, "Three and seven."])
    asked = {"model": "policy", "max_tokens": 9, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    async with served(policy) as (_, access):
        first = await client(access).messages.create(messages=ASKED, **asked)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
        assert [block.input for block in first.content[1:]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": str(block.input["a"])}],
            }
            for block in first.content[1:]
        ]
        more = [*results, {"type": "text", "text": "Go on."}]
        messages = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": more}]
        second = await client(access).messages.create(messages=messages, **asked)
    assert second.content[0].text == "Three and seven."
    history = policy.last.messages
    assert history[1] == policy.histories["0"][-1]
    assert [(one["role"], one["content"]) for one in history[2:]] == [("tool", "1"), ("tool", "3"), ("user", "Go on.")]


async def test_streams():
    policy = ScriptedPolicy(["<think>\nEasy.\n</think>\n\nThree.", TWO_CALLS])
    async with served(policy) as (_, access):
        messages = client(access).messages
        async with messages.stream(model="policy", max_tokens=9, messages=ASKED) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Three."
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert (final.content[0].thinking, final.stop_reason) == ("Easy.", "end_turn")
        assert final.usage.output_tokens > 0
        async with messages.stream(model="policy", max_tokens=9, messages=ASKED, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.input for block in final.content] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


async def test_the_stop_sequence_that_ended_a_turn_is_named():
    policy = ScriptedPolicy(["So: 3 </answer> and more."] * 2 + ["So: 3."])
    asked = {"model": "policy", "max_tokens": 90, "messages": ASKED, "stop_sequences": ["###", "</answer>"]}
    async with served(policy) as (_, access):
        messages = client(access).messages
        cut = await messages.create(**asked)
        async with messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        whole = await messages.create(**asked)
        with pytest.raises(anthropic.BadRequestError, match="must contain non-whitespace"):
            await messages.create(**{**asked, "stop_sequences": [" \n"]})
    for message in (cut, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "</answer>")
        assert message.content[0].text == "So: 3 "
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


async def test_tokens_are_counted_and_models_listed():
    policy = ScriptedPolicy([])
    async with served(policy) as (_, access):
        counted = await client(access).messages.count_tokens(model="policy", messages=ASKED, tools=[TOOL])
        assert [model.id async for model in client(access).models.list()] == ["policy"]
    assert counted.input_tokens > len(policy.renderer.render(ASKED)) > 0


async def test_the_billing_header_of_claude_code_is_no_part_of_the_conversation():
    policy = ScriptedPolicy(["One.", "Two."])
    async with served(policy) as (_, access):
        for number in range(2):
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ]
            await client(access).messages.create(model="policy", max_tokens=9, system=system, messages=ASKED)
    assert policy.requests[0].messages == policy.requests[1].messages
    assert policy.last.messages[0] == {"role": "system", "content": "Be brief."}


async def test_tools_of_the_provider_are_left_out(caplog):
    policy = ScriptedPolicy(["One."])
    search = {"type": "web_search_20250305", "name": "web_search"}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = {"model": "policy", "max_tokens": 9, "messages": ASKED}
    async with served(policy) as (_, access):
        create = client(access).messages.create
        await create(**asked, tools=[search, TOOL], tool_choice=choice)
        assert [one["function"]["name"] for one in policy.last.tools] == ["add"]
        with pytest.raises(anthropic.BadRequestError, match='not "web_search_20250305"'):
            await create(**asked, tools=[search])
        with pytest.raises(anthropic.BadRequestError, match="names none of the tools"):
            await create(**asked, tools=[search, TOOL], tool_choice={"type": "tool", "name": "web_search"})
    said = " ".join(record.message for record in caplog.records)
    assert 'offer tools of the type "web_search_20250305"' in said
    assert "set tool_choice.disable_parallel_tool_use, which has no effect" in said


async def test_a_stream_brings_pings_while_it_waits():
    policy = ScriptedPolicy(["One."])
    policy.open.clear()
    async with served(policy, keep_alive=0.02) as (_, access):
        asked = {"model": "policy", "max_tokens": 9, "messages": ASKED}
        async with client(access).messages.with_streaming_response.create(**asked, stream=True) as response:
            lines = response.iter_lines()
            assert [await anext(lines), await anext(lines)] == ["event: ping", 'data: {"type":"ping"}']
            policy.open.set()
            assert "event: message_stop" in [line async for line in lines]
        policy.script = ["One.", "Two."]
        policy.open.clear()
        asyncio.get_running_loop().call_later(0.1, policy.open.set)
        async with client(access).messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).content[0].text == "Two."


async def test_long_names_and_null_keywords_of_tools():
    policy = ScriptedPolicy(["One."])
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "default": None, "required": None}, "b": {"type": "object"}},
        "required": None,
        "items": None,
        "anyOf": None,
    }
    schema["properties"]["b"]["properties"] = None
    long = {"name": "n" * 128, "input_schema": schema}
    async with served(policy) as (_, access):
        create = client(access).messages.create
        await create(model="policy", max_tokens=9, messages=ASKED, tools=[long])
        with pytest.raises(anthropic.BadRequestError, match="up to 128 letters"):
            await create(model="policy", max_tokens=9, messages=ASKED, tools=[{**long, "name": "n" * 129}])
    assert policy.last.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "string", "default": None}, "b": {"type": "object"}},
    }


async def test_the_secret_may_be_in_the_path():
    policy = ScriptedPolicy(["Three."])
    async with served(policy) as (_, access):
        other = client(access._replace(address=access.path_address, secret="a key of its own"))
        assert (await other.messages.create(model="policy", max_tokens=9, messages=ASKED)).content[0].text == "Three."


async def test_errors_have_anthropics_shape():
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    odd = {**TOOL, "input_schema": {"type": "odd"}}
    async with served(ScriptedPolicy([])) as (_, access):
        create = client(access).messages.create
        with pytest.raises(anthropic.BadRequestError, match="at least one message is required"):
            await create(model="policy", max_tokens=9, messages=[])
        with pytest.raises(anthropic.BadRequestError, match="no type of JSON Schema"):
            await create(model="policy", max_tokens=9, messages=ASKED, tools=[odd])
        with pytest.raises(anthropic.BadRequestError, match="april fetches no addresses"):
            await create(model="policy", max_tokens=9, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.NotFoundError, match="The model 'claude' does not exist"):
            await create(model="claude", max_tokens=9, messages=ASKED)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client(access._replace(secret="0.0.x")).messages.create(model="policy", max_tokens=9, messages=ASKED)
    assert refused.value.body["error"]["type"] == "authentication_error"
