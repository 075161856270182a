"""Whatever a client sends, it gets the API's own error, and the next request is answered."""

import asyncio
import json
import logging

import aiohttp
import anthropic
import openai
import pytest

from april.rollout.episodes.turns import BadTurn, PromptTooLong, Stopping
from tests.gateway.scripted import ScriptedPolicy, served
from tests.gateway.test_anthropic_clients import client as anthropic_client
from tests.gateway.test_openai_clients import ASKED, TOOL, client

GOOD = {"model": "policy", "messages": ASKED}


def with_parameters(parameters) -> list:
    return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "empty array"),
        ({"messages": None}, "Missing required parameter: 'messages'"),
        ({"messages": "hello"}, "expected a list of objects"),
        ({"messages": [3]}, "expected an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "Supported values are"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "Supported values are"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected a string or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "april fetches no addresses",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "expected a call of a function"),
        ({"tools": with_parameters({"type": "objekt"})}, "no type of JSON Schema"),
        ({"tools": with_parameters({"type": [{}]})}, "no type of JSON Schema"),
        ({"tools": with_parameters(True)}, "parameters must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, r"it takes no part of type \[\]"),
        ({"tools": with_parameters({"type": "string"})}, 'parameters.type must be "object"'),
        ({"tools": with_parameters("x")}, "parameters must be an object"),
        ({"tools": with_parameters({"type": "object", "properties": {"a": 3}})}, "parameters.properties.a must be"),
        ({"tools": with_parameters({"type": "object", "required": "a"})}, "required must be a list of strings"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
        ({"tools": [{"type": "web_search"}]}, 'tools of the type "function" only'),
        ({"tools": [{"type": "function"}]}, r"Missing required parameter: 'tools\[0\].function'"),
        ({"tools": [TOOL, {"type": "x"}], "tool_choice": {"type": "x"}}, "names none of 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "names none of 'tools'"),
        ({"tool_choice": "required"}, "only allowed when 'tools' are specified"),
        ({"response_format": {"type": "grammar"}}, "guided decoding is refused"),
        ({"response_format": {"type": "json_schema"}}, "guided decoding is refused"),
        ({"n": 0}, "Invalid 'n'"),
        ({"n": 10**9}, "at most 128"),
        ({"max_tokens": -1}, "Invalid 'max_tokens'"),
        ({"max_tokens": "many"}, "Invalid 'max_tokens'"),
        ({"stream": "yes"}, "expected a boolean"),
        ({"stop": 3}, "Invalid 'stop': expected a string"),
        ({"stop": ["a"] * 17}, "a list of at most 16"),
        ({"stop": ["a", ""]}, "expected strings of 1 to 256 characters"),
        ({"stop": ["\ufffd"]}, r"without U\+FFFD"),
        ({"top_logprobs": 5}, "the drawn token only"),
    ],
)
async def test_a_request_that_is_none(body, message):
    policy = ScriptedPolicy(["One."])
    async with served(policy) as (_, access):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await client(access).post("/chat/completions", cast_to=object, body={**GOOD, **body})
        assert refused.value.body["type"] == "invalid_request_error"
        assert (await client(access).chat.completions.create(**GOOD)).choices[0].message.content == "One."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, "Missing required parameter: 'input'"),
        ({"input": []}, "empty array"),
        ({"input": [{"type": "computer_call"}]}, "The policy takes messages"),
        ({"input": [{"type": "function_call", "name": 3}]}, "a call has a name and arguments"),
        ({"previous_response_id": "resp_none"}, "not found"),
        ({"previous_response_id": 3}, "not found"),
        ({"tools": [{"type": "web_search"}]}, 'not "web_search"'),
        ({"text": {"format": {"type": "grammar"}}}, "guided decoding is refused"),
        ({"background": True}, "background"),
        ({"include": 5}, "Invalid type for 'include'"),
        ({"input": [{"type": [], "role": {}}]}, "The policy takes messages"),
        ({"conversation": "conv_1"}, "storage"),
    ],
)
async def test_a_response_that_cannot_be_made(body, message):
    async with served(ScriptedPolicy([])) as (_, access):
        with pytest.raises(openai.BadRequestError, match=message):
            await client(access).post("/responses", cast_to=object, body={"model": "policy", "input": "x", **body})


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{", 400, "could not parse the JSON body"),
        (b"\xff\xfe", 400, "could not parse the JSON body"),
        (b"[]", 400, "it is no object"),
        (b"", 400, "could not parse the JSON body"),
        (
            b'{"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}',
            404,
            "The model 'gpt-9' does not exist",
        ),
        (b"[" * 100_000, 400, "could not parse the JSON body"),
        (b" " * 100 * 2**20, 413, "The request has"),
    ],
    ids=["cut", "bytes", "list", "empty", "model", "deep", "100 MB"],
)
async def test_a_body_that_is_none(data, status, message):
    async with served(ScriptedPolicy(["One."])) as (_, access), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {access.secret}"}
        async with http.post(access.address + "/v1/chat/completions", data=data, headers=headers) as response:
            assert response.status == status
            assert message in (await response.json())["error"]["message"]
            assert response.headers["x-should-retry"] == "false"
        assert (await client(access).chat.completions.create(**GOOD)).choices[0].message.content == "One."


async def test_a_wrong_key_a_wrong_path_and_an_episode_that_has_ended():
    policy = ScriptedPolicy(["One."])
    async with served(policy) as (gateway, access):
        stranger = client(access._replace(secret="wrong"))
        with pytest.raises(openai.AuthenticationError, match="it is the key of no episode"):
            await stranger.chat.completions.create(**GOOD)
        async with aiohttp.ClientSession() as http:
            for key in (b"\xff\xfe.\xff", "0.0.ü".encode()):
                address = access.address + "/v1/chat/completions"
                async with http.post(address, headers={"Authorization": "Bearer " + key.decode("latin-1")}) as wrong:
                    assert wrong.status == 401
                headers = {"x-api-key": key.decode(errors="surrogateescape")}
                async with http.post(address, headers=headers, data=b" " * 100 * 2**20) as wrong:
                    assert wrong.status == 401
        with pytest.raises(openai.NotFoundError, match="The gateway has POST"):
            await client(access).post("/embeddings", cast_to=object, body=GOOD)
        other = gateway.access("1.0")
        assert other.secret != access.secret
        policy.over.add("0.0")
        with pytest.raises(openai.APIStatusError, match="The episode has ended") as over:
            await client(access).chat.completions.create(**GOOD)
        assert over.value.status_code == 410
        assert (await client(other).chat.completions.create(**GOOD)).choices[0].message.content == "One."


async def test_a_conversation_that_is_too_long_is_refused_in_the_words_of_each_api(monkeypatch):
    policy = ScriptedPolicy(["One."])

    async def refuse(*_):
        raise PromptTooLong(12, 9)

    async with served(policy) as (_, access):
        with monkeypatch.context() as patch:
            patch.setattr(policy, "reply", refuse)
            words = "This model's maximum context length is 9 tokens. However, your messages resulted in 12 tokens"
            for create, asked in (
                (client(access).chat.completions.create, GOOD),
                (client(access).responses.create, {"model": "policy", "input": "x"}),
            ):
                with pytest.raises(openai.BadRequestError, match=words) as refused:
                    await create(**asked)
                assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 12 tokens > 9 maximum"):
                await anthropic_client(access).messages.create(**GOOD, max_tokens=9)


async def test_an_error_after_a_minute_has_its_status_in_the_next_answer(monkeypatch):
    monkeypatch.setattr("april.gateway.server.PATIENCE", 0.02)
    policy = ScriptedPolicy([])
    policy.open.clear()

    async def refuse(*_):
        await policy.open.wait()
        raise BadTurn("It is wrong.")

    monkeypatch.setattr(policy, "reply", refuse)
    async with served(policy, keep_alive=0.02) as (_, access), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {access.secret}"}
        async with http.post(access.address + "/v1/chat/completions", json=GOOD, headers=headers) as begun:
            assert begun.status == 200
            policy.open.set()
            with pytest.raises(aiohttp.ClientError):
                await begun.read()
        with pytest.raises(openai.BadRequestError, match="It is wrong"):
            await client(access).chat.completions.create(**GOOD)


async def test_a_run_that_stops_lets_its_clients_ask_again(monkeypatch):
    policy = ScriptedPolicy(["One."])
    told = policy.reply

    async def stopped(*_):
        monkeypatch.setattr(policy, "reply", told)
        raise Stopping("the run stops")

    monkeypatch.setattr(policy, "reply", stopped)
    async with served(policy) as (_, access):
        patient = client(access).with_options(max_retries=1)
        assert (await patient.chat.completions.create(**GOOD)).choices[0].message.content == "One."


async def test_a_client_that_leaves_costs_its_own_request_only(caplog):
    policy = ScriptedPolicy(["One.", "Two."])
    policy.open.clear()
    async with served(policy) as (_, access):
        leaving = asyncio.create_task(client(access).chat.completions.create(**GOOD))
        while not policy.requests:
            await asyncio.sleep(0.01)
        leaving.cancel()
        while not policy.cancelled:
            await asyncio.sleep(0.01)
        policy.open.set()
        assert (await client(access).chat.completions.create(**GOOD)).choices[0].message.content == "One."
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_answer_that_cannot_be_sent_is_reported_to_the_core(monkeypatch):
    policy = ScriptedPolicy(["One."])

    async with served(policy) as (_, access):

        async def broken(self, *_):
            raise ConnectionResetError("Cannot write to closing transport")

        with monkeypatch.context() as patch:
            patch.setattr("aiohttp.web.Response.write_eof", broken)
            with pytest.raises(openai.APIConnectionError):
                await client(access).chat.completions.create(**GOOD)
    assert policy.lost == ["0"]


async def test_an_answer_whose_client_leaves_as_it_is_complete_is_reported_to_the_core():
    policy = ScriptedPolicy(["One."])
    reply = policy.reply

    async def replied(*args):
        try:
            return await reply(*args)
        finally:
            handlers = [task for task in asyncio.all_tasks() if "RequestHandler.start" in repr(task.get_coro())]
            assert handlers
            for task in handlers:
                task.cancel()  # as aiohttp does for a client that disconnects

    policy.reply = replied
    async with served(policy) as (_, access):
        with pytest.raises(openai.APIConnectionError):
            await client(access).chat.completions.create(**GOOD)
    assert policy.lost == ["0"]


async def test_a_retry_and_an_idempotency_key_reach_the_core():
    policy = ScriptedPolicy(["One.", "Two."])
    async with served(policy) as (_, access):
        create = client(access).chat.completions.create
        await create(**GOOD, extra_headers={"x-stainless-retry-count": "1"})
        assert (policy.last.retry, policy.last.key) == (True, None)
        await create(**GOOD, extra_headers={"Idempotency-Key": "k"})
        assert (policy.last.retry, policy.last.key) == (False, "k")


async def test_an_error_after_the_beginning_of_a_stream_is_an_event():
    policy = ScriptedPolicy(["One."])
    policy.open.clear()

    def over(_):
        raise BadTurn("It is over.")

    policy.script = over
    async with served(policy, keep_alive=0.02) as (_, access):
        chat = client(access).chat.completions
        stream = await chat.create(**GOOD, stream=True)
        policy.open.set()
        with pytest.raises(openai.APIError, match="It is over"):
            [chunk async for chunk in stream]


async def test_hundreds_of_requests_wait_at_once():
    policy = ScriptedPolicy(lambda request: request.messages[-1]["content"])
    policy.open.clear()
    async with served(policy) as (gateway, _), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(number: int) -> str:
            access = gateway.access(f"{number}.0")
            body = {"model": "policy", "messages": [{"role": "user", "content": str(number)}]}
            headers = {"Authorization": f"Bearer {access.secret}"}
            address = access.address + "/v1/chat/completions"
            async with http.post(address, data=json.dumps(body), headers=headers) as response:
                return (await response.json())["choices"][0]["message"]["content"]

        asked = [asyncio.create_task(ask(number)) for number in range(300)]
        while len(policy.requests) < 300:
            await asyncio.sleep(0.01)
        policy.open.set()
        assert await asyncio.gather(*asked) == [str(number) for number in range(300)]
