"""Resources servers of NeMo Gym: the package's own where it is installed (`make test-nemo-gym`), and its interface."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from april.engines.servers.launch import free_port
from april.gateway.agent import ProgramAgents
from april.gateway.nemo_gym import NeMoGymProgram
from april.rollout.episodes.environment import EnvironmentLost, ObservationError, Unrewarded
from april.rollout.episodes.turns import AgentStart
from april.tasks.build import build_task
from april.tasks.task import TaskSpec
from tests.gateway.scripted import ScriptedPolicy, call, served
from tests.local_server import listening

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("APRIL_NEMO_GYM", ROOT / ".frameworks" / "nemo-gym" / "bin" / "python"))
"""Interpreter with the package; it needs Python 3.12 and older clients than april."""
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "description": "",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": ["count"],
        "additionalProperties": False,
    },
}
RECORD = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 1, then add 2."}], "tools": [TOOL]},
    "expected_count": 6,
    "initial_count": 3,
}
SCRIPT = [call("increment_counter", '{"count": 1}'), call("increment_counter", '{"count": 2}'), "Done."]


def start(record=RECORD) -> AgentStart:
    return AgentStart("0.0", {**record, "id": "p", "prompt": "", "answer": None}, 7)


async def played(url: str, script=SCRIPT, record=RECORD, **settings):
    program = await asyncio.to_thread(NeMoGymProgram, f"nemo-gym:{url}", **settings)
    policy = ScriptedPolicy(script)
    async with served(policy) as (gateway, _):
        return await ProgramAgents(program, gateway).run(start(record)), policy


# The package's own servers


def real_server(module: str, name: str):
    if not PYTHON.exists():
        pytest.skip("nemo-gym is not installed")
    program = ROOT / "tests" / "gateway" / "nemo_gym_server.py"
    return listening(lambda port: [PYTHON, program, module, name, str(port)], {**os.environ, "PYTHONPATH": ""})


@pytest.mark.slow
async def test_a_real_server_keeps_a_session_for_each_episode():
    with real_server("resources_servers.example_session_state_mgmt.app", "StatefulCounterResourcesServer") as (url, _):
        (right, policy), (wrong, _) = await asyncio.gather(played(url), played(url, [SCRIPT[0], "Done."]))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    outputs = [message["content"] for message in policy.last.messages if message["role"] == "tool"]
    assert [json.loads(output) for output in outputs] == [{"success": True}, {"success": True}]


@pytest.mark.slow
async def test_a_real_server_of_steps():
    record = {"responses_create_params": {"input": [{"role": "user", "content": "Play blackjack."}]}}
    with real_server("resources_servers.blackjack.app", "BlackjackEnv") as (url, _):
        outcome, policy = await played(url, ["<action>stand</action>"] * 9, record)
    assert outcome.reward in (-1.0, 0.0, 0.5, 1.0, 1.5)
    assert policy.requests


# The interface


@asynccontextmanager
async def server(paths=("/seed_session", "/verify", "/increment_counter"), **handlers):
    """A server with NeMo Gym's interface."""
    app = web.Application()

    async def described(_):
        return web.json_response({"paths": {path: {} for path in paths}})

    async def seed(_):
        return web.json_response({})

    async def verify(request):
        body = await request.json()
        calls = [item for item in body["response"]["output"] if item["type"] == "function_call_output"]
        return web.json_response({**body, "reward": len(calls) / 2, "note": "kept"})

    async def increment(request):
        return web.json_response({"success": (await request.json())["count"] > 0})

    app.router.add_get("/openapi.json", handlers.get("described", described))
    app.router.add_post("/seed_session", handlers.get("seed", seed))
    app.router.add_post("/verify", handlers.get("verify", verify))
    for path in ("reset", "step"):
        if path in handlers:
            app.router.add_post(f"/{path}", handlers[path])
    app.router.add_post("/increment_counter", handlers.get("increment", increment))
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # a hanging request is not awaited
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answers(status: int, text: str):
    async def handler(_):
        return web.Response(status=status, text=text)

    return handler


async def hangs(_):
    await asyncio.sleep(3600)


async def test_an_episode_is_verified():
    async with server() as url:
        outcome, policy = await played(url)
    assert outcome.reward == 1.0
    assert outcome.info["note"] == "kept"
    assert [message["role"] for message in policy.last.messages] == ["user", *["assistant", "tool"] * 2]


async def test_an_episode_is_verified_at_the_limit_of_turns():
    async with server() as url:
        outcome, policy = await played(url, max_turns=1)
    assert (outcome.reward, len(policy.requests)) == (0.5, 1)


async def test_a_failing_tool_is_an_observation():
    async with server(increment=answers(500, "no counter")) as url:
        _, policy = await played(url, [SCRIPT[0], "Done."])
    assert [message["content"] for message in policy.last.messages if message["role"] == "tool"] == ["no counter"]


async def test_a_call_reaches_the_tools_of_its_record_alone():
    reached = []

    async def noted(request):
        reached.append(request.path)
        return web.json_response({"reward": 1.0})

    async with server(seed=noted, verify=noted) as url:
        script = [call(name, "{}") for name in ("verify", "seed_session", "openapi.json")]
        _, policy = await played(url, [*script, "Done."])
    assert reached == ["/seed_session", "/verify"]
    outputs = [message["content"] for message in policy.last.messages if message["role"] == "tool"]
    assert outputs[0] == json.dumps({"error": "There is no tool 'verify'"})
    assert len(outputs) == 3


@pytest.mark.parametrize(
    ("handlers", "error", "message"),
    [
        ({"seed": answers(422, "field required")}, Unrewarded, "/seed_session answered 422: field required"),
        ({"verify": answers(500, "KeyError('x')")}, Unrewarded, r"/verify answered 500: KeyError\('x'\)"),
        ({"verify": answers(200, "[]")}, Unrewarded, "/verify answered no JSON object"),
        ({"verify": answers(200, "{}")}, Unrewarded, "/verify answered no reward"),
        ({"verify": answers(503, "busy")}, EnvironmentLost, "/verify answered 503: busy"),
        ({"seed": hangs}, EnvironmentLost, "/seed_session did not answer within 0.2 s"),
        ({"verify": hangs}, EnvironmentLost, "/verify did not answer within 0.2 s"),
    ],
)
async def test_faults_of_a_server_are_one_line(handlers, error, message):
    async with server(**handlers) as url:
        with pytest.raises(error, match=message):
            await played(url, reset_timeout=0.2, step_timeout=0.2)


async def test_a_step_that_cannot_be_read_leaves_no_reward():
    paths = ("/reset", "/step")
    step = answers(200, json.dumps({"reward": 1.0, "info": {"tool_outputs": ["no object"]}}))
    async with server(paths, reset=answers(200, "{}"), step=step) as url:
        with pytest.raises(Unrewarded, match="gave an answer that cannot be read: AttributeError"):
            await played(url)


async def test_a_record_of_something_else_is_named():
    async with server() as url:
        with pytest.raises(ObservationError, match="the record has no responses_create_params"):
            await played(url, record={"question": "?"})


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ({"paths": ("/run", "/v1/responses")}, "this is an agent server; name its resources server"),
        ({"paths": ("/predict",)}, "this is no resources server"),
        ({"described": answers(404, "")}, "the server does not answer: Not Found"),
        ({"described": answers(200, "hello")}, "the server does not answer: Expecting value"),
        ({"described": answers(200, "[]")}, "describes no interface"),
    ],
)
async def test_another_server_is_named_before_the_run(handlers, message):
    async with server(**handlers) as url:
        with pytest.raises(ValueError, match=message):
            await asyncio.to_thread(NeMoGymProgram, f"nemo-gym:{url}")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="the server does not answer: "):
        NeMoGymProgram(f"nemo-gym:http://127.0.0.1:{free_port()}")


def test_problems_are_the_records(tmp_path):
    file = tmp_path / "example.jsonl"
    records = [{**RECORD, "initial_count": number} for number in range(5)]
    text = {"responses_create_params": {"input": "Add 3.", "instructions": "Be brief."}}
    file.write_text("\n".join(map(json.dumps, [*records, text])))
    task = build_task(TaskSpec("nemo_gym", path=str(file), eval_size=1))
    assert (len(task), task.eval_size) == (5, 1)
    both = [*(task.problem(index) for index in range(5)), task.problem(0, "eval")]
    assert {problem.id for problem in both} == {f"example:{line}" for line in range(1, 7)}
    [last] = [problem for problem in both if problem.id == "example:6"]
    assert last.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 3."}]
    assert last.metadata == text


def test_records_of_something_else_are_named(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"question": "?"}')
    with pytest.raises(ValueError, match=r"other\.jsonl:1: no responses_create_params with an input"):
        build_task(TaskSpec("nemo_gym", path=str(file)))
