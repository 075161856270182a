"""Servers that april starts itself: on a free port of the loopback interface, gone when the block ends.

Invariants:
- a server listens where only this machine reaches it, unless it is told another host, and then it asks for a key;
- a key is in no command line, which everybody on the machine sees, and in no log;
- a server and everything it spawned is one process group, and no process of it outlives the block, however it ends,
  nor this process, should it be killed;
- the server's log is in the run directory from its first line on, and its tail is in the error if it dies.

vLLM asks for its key on some paths only, and not on those that change its weights: on a network that others use, keep
it on the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from april.engines.servers.address import is_loopback, reachable
from april.rollout.engine import EngineError

LOG_TAIL = 30
GRACE = 10.0
"""Seconds a server has to end itself before it is killed."""
GUARD = 'read -r group && { read -r _; kill -s TERM -- "-$group"; sleep "$1"; kill -s KILL -- "-$group"; }'
"""A shell that reads a process group, and ends it once nobody holds the other end of its standard input any more."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: where it listens, where its log is, and the process (leader of its group)."""

    name: str
    url: str
    log: Path
    process: asyncio.subprocess.Process

    def tail(self) -> str:
        """The last lines of the log."""
        with open(self.log, errors="replace") as lines:
            return "".join(deque(lines, LOG_TAIL))


def launch_vllm(
    model: str | Path,
    *,
    log_dir: str | Path,
    python: str | Path = sys.executable,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int = 0,
    ready_timeout: float = 900.0,
    name: str = "vllm",
    host: str = "127.0.0.1",
    api_key: str | None = None,
    broadcast: bool = False,
) -> AbstractAsyncContextManager[Server]:
    """vLLM on `model`, with everything `VLLMEngine` needs; the log is `log_dir/<name>.log`.

    Args:
        model: directory or hub name.
        log_dir: the run directory.
        python: interpreter of the environment vLLM is installed in.
        arguments: more options of the server; they come last, so they win.
        environment: more environment variables.
        port: 0 takes a free one.
        ready_timeout: seconds the server may take until it answers.
        name: of the log file, and in errors.
        host: the address it listens on.
        api_key: what it asks clients for; needed where `host` is reached from other machines.
        broadcast: make the server able to take weights from an `april.engines.servers.broadcast.Broadcast`.

    Raises:
        ValueError: other machines reach `host`, and there is no key.
        EngineError: the server died or did not become ready; with the tail of its log.
    """
    port = port or free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", host, "--port", str(port)),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--seed", str(random.randrange(2**31))),  # its default is 0: replicas would draw the same numbers
        *arguments,
    ]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600", **(environment or {})}
    if api_key:
        variables["VLLM_API_KEY"] = api_key
    # The server's environment need not have april: it gets the one module it needs on a path of its own.
    plugin = Path(log_dir).absolute() / f"{name}-plugin"
    plugin.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("vllm_worker.py"), plugin / "april_vllm_worker.py")
    path = [str(plugin), *filter(None, [variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    command += ["--worker-extension-cls", "april_vllm_worker.WorkerExtension"]
    if broadcast:
        command += ["--weight-transfer-config", '{"backend": "april"}']
    return launch(name, command, port, Path(log_dir), variables, ready_timeout, host=host, api_key=api_key)


@asynccontextmanager
async def launch_sglang(
    model: str | Path,
    *,
    log_dir: str | Path,
    python: str | Path = sys.executable,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int = 0,
    ready_timeout: float = 900.0,
    name: str = "sglang",
    host: str = "127.0.0.1",
    api_key: str | None = None,
) -> AsyncIterator[Server]:
    """SGLang on `model`, with everything `SGLangEngine` needs. Arguments and errors as of `launch_vllm`.

    SGLang takes its key as an option or from a file of options, never from the environment: it gets a file that only
    this user can read, and that is gone when the block ends.
    """
    port = port or free_port()
    command = [
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", host, "--port", str(port)),
        *("--incremental-streaming-output", "--skip-server-warmup"),
        *arguments,
    ]
    with tempfile.TemporaryDirectory(prefix="april-") as directory:  # made so that only its owner can enter it
        if api_key:
            options = Path(directory) / "options.yaml"
            options.write_text(f"api-key: {json.dumps(api_key)}\n")
            command += ["--config", str(options)]
        async with launch(
            name, command, port, Path(log_dir), environment or {}, ready_timeout, host=host, api_key=api_key
        ) as server:
            yield server


@asynccontextmanager
async def launch(
    name: str,
    command: Sequence[str],
    port: int,
    log_dir: Path,
    environment: Mapping[str, str],
    ready_timeout: float,
    health_path: str = "/health",
    host: str = "127.0.0.1",
    api_key: str | None = None,
) -> AsyncIterator[Server]:
    """Run any server that answers 200 at `health_path` once it is ready."""
    if not api_key and not is_loopback(host):
        raise ValueError(f"host = {host!r}: other machines reach a server there: give it an api_key to ask for")
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{name}.log"
    async with _guard() as guard:
        with open(path, "wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    # Servers are known to log their settings, key and all: what they say then goes through here.
                    stdout=asyncio.subprocess.PIPE if api_key else output,
                    stderr=asyncio.subprocess.STDOUT,
                    # A log that is buffered lacks its last lines, or has them in another order.
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{name} could not be started: {error}") from error
        guard(process.pid)
        server = Server(name, f"http://{reachable(host)}:{port}", path, process)
        logging = {asyncio.create_task(_log(process, path, api_key), name=f"log of {name}")} if api_key else set()
        try:
            await _ready(server, health_path, ready_timeout, logging)
            yield server
        finally:
            await _stop(process)
            for task in logging:  # what has left the process group may hold its end open
                with suppress(TimeoutError):
                    await asyncio.wait_for(task, GRACE)


@asynccontextmanager
async def _guard() -> AsyncIterator[Callable[[int], None]]:
    """A process that ends the process group it is told of, should this process end within the block."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", GUARD, "sh", f"{GRACE:g}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    stdin = process.stdin
    try:
        yield lambda group: stdin.write(f"{group}\n".encode())
    finally:
        process.kill()
        await process.wait()


async def _log(process: asyncio.subprocess.Process, path: Path, secret: str) -> None:
    """Write what a server says to `path`, with stars where the secret stood."""
    assert process.stdout is not None
    hidden, rest = secret.encode(), b""
    with open(path, "ab", buffering=0) as log:
        while data := await process.stdout.read(2**16):
            text = (rest + data).replace(hidden, b"***")
            end = max(0, len(text) - len(hidden) + 1)  # the rest may be the beginning of a secret
            log.write(text[:end])
            rest = text[end:]
        log.write(rest)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _ready(server: Server, health_path: str, timeout: float, logging: set[asyncio.Task[None]]) -> None:
    client = aiohttp.ClientTimeout(total=10)
    try:
        async with asyncio.timeout(timeout), aiohttp.ClientSession(server.url, timeout=client) as session:
            while True:
                if server.process.returncode is not None:
                    if logging:
                        await asyncio.wait(logging, timeout=1.0)
                    raise EngineError(
                        f"{server.name} died while starting (exit status {server.process.returncode}); the end of its "
                        f"log, {server.log}:\n{server.tail()}"
                    )
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(health_path) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise EngineError(
            f"{server.name} was not ready after {timeout:g} s (ready_timeout); the end of its log, "
            f"{server.log}:\n{server.tail()}"
        ) from None


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the whole process group: politely, then not. Cancelling this does not spare the group."""
    try:
        if _signal_group(process.pid, signal.SIGTERM):
            async with asyncio.timeout(GRACE):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        # What the server spawned may survive its leader.
        _signal_group(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


def _signal_group(group: int, number: signal.Signals) -> bool:
    """False if nothing is left of the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
