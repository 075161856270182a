"""Start of servers: no process is left in any case, and the log contains the cause of a failure."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from april.engines.servers.address import is_loopback
from april.engines.servers.launch import Launch, Server, free_port, launch, launch_sglang, launch_vllm
from april.rollout.engine import EngineError
from tests.limits import HANG

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path: Path, script: str, ready_timeout: float = 20.0, **settings: Any) -> Any:
    port = free_port()
    command = [sys.executable, "-c", script, str(port)]
    how = Launch(
        name="toy",
        log_dir=tmp_path / "run",
        port=port,
        environment={"A": "1"},
        ready_timeout=ready_timeout,
        **settings,
    )
    return launch(command, how)


def child_of(log: Path) -> int:
    return int(log.read_text().split()[1])


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


async def gone(pid: int) -> bool:
    """A killed process may take a moment to be reaped."""
    given_up = time.monotonic() + HANG
    while time.monotonic() < given_up:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            return True
        await asyncio.sleep(0.01)
    return False


async def test_the_whole_process_group_ends_with_the_block(tmp_path: Path) -> None:
    async with start(tmp_path, SERVER) as server:
        assert server.log == tmp_path / "run" / "toy.log"
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
            assert response.status == 200
        child = child_of(server.log)
        os.kill(child, 0)
    assert server.process.returncode is not None
    assert await gone(child)


async def test_a_server_ends_when_its_block_raises_or_is_cancelled(tmp_path: Path) -> None:
    pids = []

    async def use(error: Exception | None) -> None:
        async with start(tmp_path, SERVER) as server:
            pids.append(child_of(server.log))
            if error is not None:
                raise error
            await asyncio.sleep(600)

    with pytest.raises(RuntimeError, match="trainer"):
        await use(RuntimeError("the trainer failed"))
    task = asyncio.create_task(use(None))
    while len(pids) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all([await gone(pid) for pid in pids])


@pytest.mark.parametrize("children_first", [False, True], ids=["alone", "with its children, as Ray does"])
async def test_a_server_ends_with_a_killed_process(tmp_path: Path, children_first: bool) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from april.engines.servers.launch import Launch, free_port, launch

async def main():
    port = free_port()
    command = [sys.executable, "-c", {SERVER!r}, str(port)]
    async with launch(command, Launch(name="toy", port=port, log_dir={str(tmp_path)!r})) as server:
        print(server.process.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    server = int(await owner.stdout.readline())
    child = child_of(tmp_path / "toy.log")
    os.kill(child, 0)
    if children_first:
        owner.send_signal(signal.SIGSTOP)
        for pid in children_of(owner.pid):
            os.kill(pid, signal.SIGKILL)
    owner.kill()
    await owner.wait()
    assert await gone(server)
    assert await gone(child)


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.engines.servers.process_group.GRACE", 0.2)
    async with start(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVER) as server:
        child = child_of(server.log)
    assert server.process.returncode == -9
    assert await gone(child)


async def test_the_cause_of_a_failed_start_is_one_line(tmp_path: Path) -> None:
    script = "import sys\nfor i in range(100): print('line', i)\nraise ValueError('no such model')"
    with pytest.raises(EngineError) as caught:
        async with start(tmp_path, script):
            pass
    log = tmp_path / "run" / "toy.log"
    assert str(caught.value) == f"toy died while starting (exit status 1): ValueError: no such model; log: {log}"


async def test_the_cause_of_a_servers_exit_is_reported(tmp_path: Path) -> None:
    """As SGLang does, when its scheduler has failed."""
    said = "ValueError: no memory\n[1] kill_process_tree called"
    script = f"import os; print({said!r}, flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(EngineError, match=r"while starting \(killed by SIGKILL.*\): ValueError: no memory; log"):
        async with start(tmp_path, script):
            pass


async def test_a_dead_server_is_restarted_on_its_port_and_given_up_if_it_does_not_become_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("april.engines.servers.launch.BACKOFF", 0.01)
    starts = tmp_path / "starts"
    counted = f"import pathlib; starts = pathlib.Path({str(starts)!r}); starts.open('a').write('x')\n"
    counted += "if len(starts.read_text()) > 3: raise ValueError('no more')\n"
    async with start(tmp_path, counted + SERVER, restarts=1) as server:
        for death in range(3):
            first, child = server.process.pid, int(re.findall(r"child (\d+)", server.log.read_text())[-1])
            os.kill(first, signal.SIGKILL)
            while server.down is None:
                await asyncio.sleep(0)
            assert await gone(child), "nothing of the dead server is left"
            while not server.given_up and server.down is not None:
                await asyncio.sleep(0.01)
            assert server.given_up == (death == 2)
            assert server.process.pid != first or server.given_up
        assert server.down == f"toy died while starting (exit status 1): ValueError: no more; log: {server.log}"
        assert starts.read_text() == "x" * 5
    said = [record.getMessage().partition("; it is ")[2] for record in caplog.records]
    assert said[-1] == "not started again, for it died 2 times before it was ready"
    assert said[:-1] == [f"started again in {delay} s" for delay in (0.01, 0.02, 0.04, 0.08)]


async def test_progress_of_a_servers_start_is_logged(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    slow = "import time; time.sleep(1.5)" + SERVER
    async with start(tmp_path, slow, waiting=lambda server, seconds: told.append((server.name, seconds))):
        pass
    assert told
    assert all(name == "toy" and seconds >= 1 for name, seconds in told)


async def test_a_server_that_does_not_become_ready_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"toy was not ready after 0\.5 s \(ready_timeout\)"):
        async with start(tmp_path, "import time; time.sleep(600)", ready_timeout=0.5):
            pass


async def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="toy could not be started"):
        async with launch(["/nowhere/python"], Launch(name="toy", port=1, log_dir=tmp_path)):
            pass


CONFESSION = """
import http.server, os, sys
from pathlib import Path
given = sys.argv + [text for arg in sys.argv if arg.endswith("yaml") for text in [Path(arg).read_text()]]
print("settings:", given, os.environ.get("VLLM_API_KEY"), flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
"""
"""A server that logs all it knows: its options, the file of options, its key."""


@pytest.mark.parametrize("launch_it", [launch_vllm, launch_sglang])
async def test_a_key_reaches_the_server_and_neither_its_log_nor_the_list_of_processes(
    tmp_path: Path, launch_it: Callable[..., AbstractAsyncContextManager[Server]]
) -> None:
    python = tmp_path / "python"
    (tmp_path / "server.py").write_text(CONFESSION)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o700)
    key = "sk-sentinel"
    how = Launch(log_dir=tmp_path / "run", python=python, host="0.0.0.0", api_key=key)
    async with launch_it("m", how) as server:
        arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
        assert b"0.0.0.0" in arguments
        assert key.encode() not in b" ".join(arguments)
        options = [Path(argument.decode()) for argument in arguments if argument.endswith(b".yaml")]
        assert all(key in path.read_text() and path.parent.stat().st_mode & 0o077 == 0 for path in options)
        assert server.url.startswith("http://127.0.0.1:")
    assert not any(path.exists() for path in options)
    log = server.log.read_text()
    assert key not in log
    assert "***" in log, "the server has the key, and tried to log it"


@pytest.mark.parametrize("launch_it", [launch_vllm, launch_sglang])
async def test_a_server_listens_on_loopback_by_default(
    tmp_path: Path, launch_it: Callable[..., AbstractAsyncContextManager[Server]]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{CONFESSION.replace(chr(39), '')}' \"$@\"\n")
    python.chmod(0o700)
    async with launch_it("m", Launch(log_dir=tmp_path / "run", python=python)) as server:
        assert "'--host', '127.0.0.1'" in server.log.read_text()
    with pytest.raises(ValueError, match=r"host = '0\.0\.0\.0': other machines reach a server there"):
        Launch(log_dir=tmp_path / "run", python=python, host="0.0.0.0")


def test_loopback_addresses_are_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


@pytest.mark.parametrize("transfer", ["broadcast", "ipc"])
def test_vllm_is_started_for_its_transfer_of_weights(
    transfer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(
        "april.engines.servers.launch.launch", lambda command, how: started.update(command=command, how=how)
    )
    launch_vllm(
        "model", Launch(log_dir=tmp_path, gpus=("uuid",)), broadcast=transfer == "broadcast", ipc=transfer == "ipc"
    )
    options = started["command"]
    backend = json.loads(options[options.index("--weight-transfer-config") + 1])["backend"]
    assert backend == {"broadcast": "april", "ipc": "ipc"}[transfer]
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in started["how"].environment) == (transfer == "ipc")
    assert started["how"].gpus == ("uuid",)
