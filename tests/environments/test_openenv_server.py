"""Environments behind real OpenEnv servers, by their URL (`make test-environments`), and servers that are none."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from april import EnvironmentLost, Turn
from april.engines.servers.launch import free_port
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.environments.workers import EnvironmentWorkers
from april.rollout.episodes.environment import ObservationError, checked
from tests.local_server import listening

pytest.importorskip("aiohttp")

ROW = {"id": "p", "prompt": [{"role": "user", "content": "Play."}], "answer": None}


def source(url: str, **params) -> EnvironmentSource:
    return EnvironmentSource(EnvironmentSpec(f"openenv:{url}", params=params))


def turn(text: str, index: int = 0) -> Turn:
    return Turn("0.0", index, text, (1,))


def server(kind: str = "guess", most: int = 8):
    pytest.importorskip("openenv.core.env_server")
    program = Path(__file__).with_name("openenv_echo.py")
    return listening(lambda port: [sys.executable, program, kind, str(port), str(most)], os.environ)


async def test_episodes_have_sessions_of_their_own_and_replay():
    with server() as (url, _):
        made = source(url)
        environments = [made() for _ in range(3)]
        seeds = [1, 1, 2]
        begun = [await one.reset(ROW, seed) for one, seed in zip(environments, seeds, strict=True)]
        assert begun == ["Guess in p."] * 3
        for one, seed in zip(environments, seeds, strict=True):
            number = random.Random(seed).randint(1, 9)
            wrong = checked(await one.step(turn(str(number + 1))))
            assert (wrong.observation, wrong.reward, wrong.done) == ("wrong", 0.0, False)
            right = checked(await one.step(turn(str(number))))
            assert (right.observation, right.reward, right.done) == ("right", 1.0, True)
        assert await environments[0].reset(ROW, 2) == "Guess in p."
        for one in environments:
            await one.close()


async def test_an_action_with_several_fields_is_a_json_object():
    with server("grid") as (url, _):
        environment = source(url)()
        assert await environment.reset(ROW, 1) == '{"cells": [0, 0], "note": "empty"}'
        assert (await environment.step(turn("I move"))).observation == (
            "Error: answer with a JSON object with the fields row, column"
        )
        wrong = await environment.step(turn('{"row": "x", "column": 2}'))
        assert wrong.observation.startswith("Error: ")
        assert not wrong.done
        step = checked(await environment.step(turn('I choose {"row": 1, "column": 2}.')))
        assert (step.observation, step.reward, step.done) == ('{"cells": [1, 2], "note": "moved"}', 1.0, True)
        await environment.close()


async def test_functions_of_the_user_convert_actions_and_observations(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def action(text):\n    return {'row': int(text), 'column': 0}\n"
        "def say(observation):\n    return str(sum(observation['cells']))\n"
    )
    with server("grid") as (url, _):
        environment = source(url, action=f"{tmp_path}/mine.py:action", observation=f"{tmp_path}/mine.py:say")()
        assert await environment.reset(ROW, 1) == "0"
        assert (await environment.step(turn("7"))).observation == "7"
        await environment.close()


async def test_a_server_that_fails_is_full_or_is_gone():
    with server(most=1) as (url, process):
        first, second = source(url)(), source(url)()
        await first.reset(ROW, 1)
        with pytest.raises(EnvironmentLost, match="has no place for another session"):
            await second.reset(ROW, 1)
        await second.close()
        with pytest.raises(ObservationError, match="the environment fails"):
            await first.step(turn("fail"))
        process.kill()
        with pytest.raises(EnvironmentLost, match=r"closed the session|is lost"):
            await first.step(turn("1"))
        await first.close()


async def test_a_reset_that_hangs_ends_at_its_time_limit_in_a_worker():
    with server() as (url, _), EnvironmentWorkers(source(url, hang=3600.0), 1) as workers:
        environment = workers()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.reset(ROW, 1), 10.0)
        with pytest.raises(EnvironmentLost):
            await environment.step(turn("1"))


class Other(BaseHTTPRequestHandler):
    body = b"{}"

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{}", "describes no action: this is no OpenEnv server"), (b"hello", "does not answer: Expecting value")],
)
def test_another_server_is_named_before_the_run(body, message):
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Other,), {"body": body})) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match=rf"path = 'openenv:http.*{message}"):
            source(f"http://127.0.0.1:{other.server_address[1]}")
        other.shutdown()


def test_a_server_that_is_not_there_is_named_before_the_run():
    with pytest.raises(ValueError, match=r"path = 'openenv:http.*does not answer: .*refused"):
        source(f"http://127.0.0.1:{free_port()}")
