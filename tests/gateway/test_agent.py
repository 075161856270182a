"""Programs of all kinds play an episode through the gateway; their faults are one line about their own episode."""

import asyncio
import os
import resource
import socket
import threading
from pathlib import Path

import openai
import pytest
from aiohttp import web

from april.gateway.agent import CommandProgram, FunctionProgram, ProgramAgents, RemoteProgram, watched_socket
from april.rollout.episodes.environment import EnvironmentLost, ObservationError, Unrewarded
from april.rollout.episodes.turns import AgentStart
from tests.gateway.scripted import ScriptedPolicy, served, until

ROW = {"id": "p", "prompt": [{"role": "user", "content": "Guess."}], "answer": None}
START = AgentStart("0.0", ROW, 7)
OPENAI = """
import json, sys, openai
row = json.loads(sys.stdin.readline())
answer = openai.OpenAI().chat.completions.create(model="policy", messages=row["prompt"])
print("a line before")
print("thinking aloud", file=sys.stderr)
print(json.dumps({"reward": len(answer.choices[0].message.content), "seed": row["seed"]}))
"""


def command(tmp_path, text: str, **settings) -> CommandProgram:
    (tmp_path / "agent.py").write_text(text)
    return CommandProgram(["python", str(tmp_path / "agent.py")], **settings)


async def run(program, policy=None, rewarded=True):
    policy = policy or ScriptedPolicy(["32", "16"])
    async with served(policy) as (gateway, _):
        return await played(ProgramAgents(program, gateway, rewarded))


async def played(agents):
    return await agents.rewarded(START, await agents.run(START))


async def test_a_command_uses_openais_client_as_it_is(tmp_path):
    policy = ScriptedPolicy(["32"])
    outcome = await run(command(tmp_path, OPENAI), policy)
    assert outcome.reward == 2.0
    assert outcome.info == {"seed": 7, "stderr": "thinking aloud\n"}
    assert policy.last.messages == ROW["prompt"]


async def test_a_function_gets_the_record_and_the_access():
    async def play(record, access):
        client = openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret)
        async with client:
            answer = await client.chat.completions.create(model=access.model, messages=record["prompt"])
        return {"reward": float(answer.choices[0].message.content), "seed": record["seed"]}

    outcome = await run(FunctionProgram(play))
    assert (outcome.reward, outcome.info) == (32.0, {"seed": 7})


async def test_something_elsewhere_gets_the_url_and_answers_late():
    seen = []

    async def play(request):
        body = await request.json()
        seen.append({key: body[key] for key in ("id", "seed", "again", "model")})
        client = openai.AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"])
        async with client:
            await client.chat.completions.create(model="policy", messages=body["prompt"])
        return web.json_response({"reward": 0.5, "note": "far away"}, headers={"X": request.headers["Key"]})

    async with service(play) as url:
        program = RemoteProgram(url, {"Key": "k"})
        outcome = await run(program)
    assert (outcome.reward, outcome.info) == (0.5, {"note": "far away"})
    assert seen == [{"id": "p", "seed": 7, "again": False, "model": "policy"}]


async def test_a_service_says_that_its_program_outlived_april():
    async def play(_):
        return web.json_response({"reward": 0.5, "continued": True})

    async with service(play) as url:
        program = RemoteProgram(url)
        assert program.outlives
        outcome = await run(program)
    assert (outcome.reward, outcome.info, outcome.continued) == (0.5, {}, True)


async def test_a_connection_to_a_machine_that_is_gone_ends(monkeypatch):
    """The answer may take hours, so the connection tests the other machine."""
    made = []

    def noted(address):
        made.append(watched_socket(address))
        return made[-1]

    async def play(_):
        [connection] = made
        return web.json_response({"reward": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)})

    monkeypatch.setattr("april.gateway.agent.watched_socket", noted)
    async with service(play) as url:
        outcome = await run(RemoteProgram(url))
    assert outcome.reward == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no reward')", "the program gave no reward"),
        ('print(\'{"reward": "much"}\')', "the program gave no reward"),
        ("raise KeyError('lost')", "the program failed: exit code 1, KeyError: 'lost'"),
        ("import sys; sys.exit('gone')", "the program failed: exit code 1, gone"),
        ("import os; os.kill(os.getpid(), 9)", "the program failed: exit code -9"),
    ],
)
async def test_a_command_that_fails_is_named(tmp_path, text, message):
    with pytest.raises(ObservationError, match=message) as failed:
        await run(command(tmp_path, text))
    if "KeyError" in message:
        assert failed.value.info["stderr"].startswith("Traceback")


async def test_programs_that_cannot_be_run():
    with pytest.raises(ObservationError, match="no/such/program cannot be started: No such file"):
        await run(CommandProgram(["no/such/program"]))
    with pytest.raises(ValueError, match="give a list of words"):
        CommandProgram("python agent.py")
    with pytest.raises(ValueError, match="is no http address"):
        RemoteProgram("ftp://x")
    with pytest.raises(EnvironmentLost, match="is lost: ClientConnectorError"):
        await run(RemoteProgram("http://127.0.0.1:9"))


@pytest.mark.parametrize(("status", "error"), [(404, ObservationError), (503, EnvironmentLost)])
async def test_a_service_that_refuses(status, error):
    async def refuse(_):
        return web.Response(status=status, text="not here")

    async with service(refuse) as url:
        program = RemoteProgram(url)
        with pytest.raises(error, match=f"answered {status}: not here"):
            await run(program)


async def test_a_function_may_reward_the_whole_episode():
    async def play(record, access):
        return {"note": "played"}

    def score(record, conversations, given):
        return {"reward": len(conversations) + record["seed"], "given": given}

    async def later(record, conversations, given):
        return score(record, conversations, given)["reward"]

    async with served(ScriptedPolicy([])) as (gateway, _):
        for function in (score, later):
            agents = ProgramAgents(FunctionProgram(play), gateway, True, function, lambda key: [[{"role": "user"}], []])
            outcome = await played(agents)
            assert outcome.reward == 9.0
            assert outcome.info["note"] == "played"


async def test_an_episode_whose_reward_fails_has_none():
    async def play(record, access):
        return {"note": "played"}

    def score(record, conversations, given):
        raise KeyError("judge")

    async with served(ScriptedPolicy([])) as (gateway, _):
        agents = ProgramAgents(FunctionProgram(play), gateway, True, score, lambda key: [])
        with pytest.raises(Unrewarded, match=r"environment\.score failed: KeyError: 'judge'") as failed:
            await played(agents)
        assert failed.value.info["note"] == "played"
        with pytest.raises(Unrewarded, match="the program gave no reward"):
            await played(ProgramAgents(FunctionProgram(play), gateway))


async def test_a_score_that_hangs_ends_without_a_reward():
    async def play(record, access):
        return {"note": "played"}

    async def hangs(record, conversations, given):
        await asyncio.Event().wait()

    async def slow(record, conversations, given):
        raise TimeoutError("the judge is busy")

    async with served(ScriptedPolicy([])) as (gateway, _):
        for function, message in (
            (hangs, r"environment\.score took longer than environment\.step_timeout = 0\.1 s"),
            (slow, r"environment\.score failed: TimeoutError: the judge is busy"),
        ):
            agents = ProgramAgents(FunctionProgram(play), gateway, True, function, lambda key: [], score_timeout=0.1)
            with pytest.raises(Unrewarded, match=message) as failed:
                await played(agents)
            assert failed.value.info["note"] == "played"


async def test_scores_that_hang_delay_no_other_score():
    async def play(record, access):
        return {"reward": 1.0}

    end, first = threading.Event(), iter([True] * 40)

    def score(record, conversations, given):
        return end.wait() if next(first, False) else 3.0

    try:
        async with served(ScriptedPolicy([])) as (gateway, _):
            agents = ProgramAgents(FunctionProgram(play), gateway, True, score, lambda key: [], score_timeout=0.5)
            late = await asyncio.gather(*(played(agents) for _ in range(40)), return_exceptions=True)
            assert all(isinstance(error, Unrewarded) for error in late)
            assert (await played(agents)).reward == 3.0
    finally:
        end.set()


async def test_the_task_may_reward_a_program(tmp_path):
    outcome = await run(command(tmp_path, "print('done')"), rewarded=False)
    assert outcome.reward is None


async def test_a_program_that_is_stopped_ends_with_all_that_it_started(tmp_path):
    text = """
import os, signal, subprocess, sys, time
sys.stdin.readline()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid} ")
time.sleep(1000)
"""
    os.environ["PIDS"] = str(tmp_path / "pids")
    running = asyncio.create_task(run(command(tmp_path, text)))
    await until(lambda: len(_text(tmp_path / "pids").split()) == 2, running)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.gateway.agent.GRACE", 0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        await until(lambda pid=pid: not _lives(pid))


async def test_a_program_sees_no_secret_but_those_that_it_may(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sk-1")
    monkeypatch.setenv("JUDGE_KEY", "sk-2")
    text = """
import json, os
names = ["WANDB_API_KEY", "JUDGE_KEY", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "APRIL_MODEL"]
print(json.dumps({"reward": 0, **{name: os.environ.get(name) for name in names}}))
"""
    info = (await run(command(tmp_path, text, keep_env=["JUDGE_KEY"]))).info
    assert (info["WANDB_API_KEY"], info["JUDGE_KEY"], info["APRIL_MODEL"]) == (None, "sk-2", "policy")
    assert info["OPENAI_API_KEY"].startswith("0.0.")
    assert info["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")


async def test_a_program_that_does_not_read_its_record_ends_with_its_episode(tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    program = command(
        tmp_path, "import os, time; open(os.environ['PIDS'], 'w').write(f'{os.getpid()} '); time.sleep(1000)"
    )
    row = {**ROW, "prompt": "x" * 2**20}
    async with served(ScriptedPolicy([])) as (_, access):
        running = asyncio.create_task(program.play(START._replace(row=row), access))
        await until(lambda: _text(tmp_path / "pids").endswith(" "), running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await until(lambda: not _lives(int((tmp_path / "pids").read_text())))


async def test_a_second_cancellation_ends_a_program_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    text = """
import os, signal, sys, time
sys.stdin.readline()
signal.signal(signal.SIGTERM, lambda *_: open(os.environ["PIDS"] + ".term", "w").close())
open(os.environ["PIDS"], "w").write(f"{os.getpid()} ")
while True:
    time.sleep(1)
"""
    running = asyncio.create_task(run(command(tmp_path, text)))
    await until(lambda: _text(tmp_path / "pids").endswith(" "), running)
    monkeypatch.setattr("april.gateway.agent.GRACE", 1000.0)
    running.cancel()
    await until((tmp_path / "pids.term").exists, running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not _lives(int((tmp_path / "pids").read_text())))


async def test_each_episode_of_a_command_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("NAME = 'helper'")
    (tmp_path / "data.txt").write_text("data")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__init__.py").write_text("")
    text = """
import json, os, sys
import helper
print(json.dumps({"reward": 1, "files": os.listdir(), "folder": os.getcwd(), "given": sys.argv[1:]}))
open("left", "w").close()
"""
    for name in ("agent.py", "part/agent.py"):
        (tmp_path / name).write_text(text)
    words = ["data.txt", "--data=data.txt", "./part", "part", "--verbose", "none.txt"]
    expected = [str(tmp_path / "data.txt"), f"--data={tmp_path / 'data.txt'}", str(tmp_path / "part"), *words[3:]]
    folders = []
    for begun in (["agent.py"], ["agent.py"], ["-m", "part.agent"]):
        info = (await run(CommandProgram(["python", *begun, *words]))).info
        assert (info["files"], info["given"]) == ([], expected)
        folders.append(info["folder"])
    assert len(set(folders)) == 3
    await until(lambda: not any(map(os.path.exists, folders)))


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_no_proxy_stands_between_a_program_and_the_gateway(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")

    async def play(record, access):
        async with openai.AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret) as client:
            await client.chat.completions.create(model="policy", messages=record["prompt"])
        return 3.0

    assert (await run(FunctionProgram(play))).reward == 3.0
    assert (await run(command(tmp_path, OPENAI))).reward == 2.0
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,127.0.0.1"


async def test_the_gateway_may_open_as_many_files_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        async with served(ScriptedPolicy([])):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


class service:
    """A service elsewhere."""

    def __init__(self, handler) -> None:
        app = web.Application()
        app.router.add_post("/play", handler)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/play"

    async def __aexit__(self, *error) -> None:
        await self._runner.cleanup()
