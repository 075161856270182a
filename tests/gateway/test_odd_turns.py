"""Whatever the policy draws, every client gets an answer that it can read, and sends back the turn that it was."""

import json

import pytest

from tests.gateway import test_anthropic_clients, test_openai_clients
from tests.gateway.scripted import ScriptedPolicy, call, served
from tests.gateway.test_openai_clients import ASKED, FLAT_TOOL, TOOL

HALF = call("add", '{"t": "\\ud83d", "\\udc00": 1}')
UNREADABLE = {
    "nested": call("add", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    "deep": call("add", '{"a": ' + "[" * 150 + "]" * 150 + "}"),
    "open": call("add", "[" * 5000),
    "nan": call("add", '{"a": NaN}'),
    "huge": call("add", '{"a": ' + "9" * 400 + "}"),
    "digits": call("add", '{"a": ' + "9" * 5000 + "}"),
}


async def test_half_a_surrogate_pair_in_the_arguments_of_a_call():
    policy = ScriptedPolicy([HALF] * 6)
    expected = {"t": "\ufffd", "\ufffd": 1}
    async with served(policy) as (_, access):
        openai = test_openai_clients.client(access)
        anthropic = test_anthropic_clients.client(access)
        asked = {"model": "policy", "messages": ASKED}
        chat = await openai.chat.completions.create(**asked, tools=[TOOL])
        async with openai.chat.completions.stream(**asked, tools=[TOOL]) as stream:
            streamed = await stream.get_final_completion()
        for got in (chat, streamed):
            assert json.loads(got.choices[0].message.tool_calls[0].function.arguments) == expected
        response = await openai.responses.create(model="policy", input="x", tools=[FLAT_TOOL])
        assert json.loads(response.output[0].arguments) == expected
        message = await anthropic.messages.create(**asked, max_tokens=9, tools=[test_anthropic_clients.TOOL])
        assert message.content[0].input == expected
        back = [*ASKED, chat.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "3"}]
        await openai.chat.completions.create(model="policy", messages=back, tools=[TOOL])
    assert policy.last.messages[1] == policy.histories["0"][-1]


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_call_that_no_client_could_read_is_text(text):
    policy = ScriptedPolicy([text] * 4)
    async with served(policy) as (_, access):
        openai = test_openai_clients.client(access)
        anthropic = test_anthropic_clients.client(access)
        asked = {"model": "policy", "messages": ASKED}
        chat = await openai.chat.completions.create(**asked, tools=[TOOL])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text, "stop")
        response = await openai.responses.create(model="policy", input="x", tools=[FLAT_TOOL])
        assert response.output_text == text
        message = await anthropic.messages.create(**asked, max_tokens=9, tools=[test_anthropic_clients.TOOL])
        assert message.content[0].text == text


async def test_arguments_of_a_client_that_are_nested_too_deeply():
    policy = ScriptedPolicy(["One."])
    function = {"name": "add", "arguments": "[" * 5000}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    async with served(policy) as (_, access):
        chat = test_openai_clients.client(access).chat.completions
        messages = [*ASKED, said, {"role": "tool", "tool_call_id": "x", "content": "3"}]
        answer = await chat.create(model="policy", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "One."
