"""Servers that april starts: on a free port of the loopback interface, ended with the block.

Invariants:
- a server listens on the loopback interface, unless another host is set, which requires an API key;
- a key is in no command line, which other users of the machine can read, and in no log;
- a server that dies is started again on its port, unless it died more than `restarts` times in a row before it was
  ready, and a warning names the cause of each death and the path of the log;
- a server starts only while its gate is open;
- the server's log is in the run directory from its first line on; restarts append to it, also in a later run or actor.

vLLM checks its key on some paths only, and not on paths that change its weights: on a shared network, keep it on the
loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import aiohttp

from april.engines.servers.address import is_loopback, reachable
from april.engines.servers.log_cause import cause, exit_of, last_line
from april.engines.servers.process_group import process_group, signal_group
from april.engines.start_gate import StartGate
from april.engines.supervisor import RestartPolicy, Supervisor
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

RESTARTS = 3
"""Deaths in a row, before it was ready, after which a server is not started again."""
STEADY = 600.0
"""Seconds of running after which earlier deaths of a server no longer count."""
BACKOFF = 1.0
"""Seconds before a dead server is started again, after its first death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of a server's start.

    Args:
        log_dir: the run directory; the log is `log_dir/<name>.log`.
        name: name of the log file, and in errors; the kind of server by default.
        python: interpreter of the environment that the server is installed in.
        arguments: more options of the server; they come last, so they win.
        gpus: UUIDs of its GPUs as torch prints them, by rank; empty if unknown.
        environment: more environment variables.
        host: the address it listens on.
        port: 0 takes a free one.
        api_key: key that clients have to send; required if other machines reach `host`.
        ready_timeout: seconds the server may take until it answers.
        restarts: deaths in a row, before it is ready, after which it is started again, on its port.
        waiting: called about every second while it starts, with the server and the seconds since its start.
        gate: when it may start, if it shares its devices with the trainer.

    Raises:
        ValueError: other machines reach `host`, and there is no key.
    """

    log_dir: str | Path
    name: str = ""
    python: str | Path = sys.executable
    arguments: Sequence[str] = ()
    gpus: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    ready_timeout: float = 900.0
    restarts: int = RESTARTS
    waiting: Callable[[Server, float], None] | None = None
    gate: StartGate = field(default_factory=StartGate)

    def __post_init__(self) -> None:
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r}: other machines reach a server there: give it an api_key to ask for"
            )

    def settled(self, kind: str) -> Launch:
        """Return a copy with a name and a free port."""
        return replace(self, name=self.name or kind, port=self.port or free_port())

    @property
    def url(self) -> str:
        return f"http://{reachable(self.host)}:{self.port}"

    @property
    def log(self) -> Path:
        return Path(self.log_dir) / f"{self.name}.log"


@dataclass(slots=True, eq=False)
class Server:
    """A server process that april runs.

    Args:
        command: with all its options.
        how: settled.
    """

    command: Sequence[str]
    how: Launch
    process: asyncio.subprocess.Process = field(init=False)
    """Leader of the latest process group."""
    down: str | None = field(default=None, init=False)
    """Why it does not run; None while it does."""
    supervisor: Supervisor = field(init=False)
    _log_start: int = field(default=0, init=False)
    """Position in the log at the latest start."""

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(RestartPolicy(BACKOFF, self.how.restarts, steady_after=STEADY))

    @property
    def given_up(self) -> bool:
        """Whether it died so often that it is not started again."""
        return self.supervisor.given_up

    @property
    def name(self) -> str:
        return self.how.name

    @property
    def url(self) -> str:
        return self.how.url

    @property
    def log(self) -> Path:
        return self.how.log

    async def keep_running(self, started: asyncio.Event) -> None:
        """Run the server until this is cancelled or it is given up. Set `started` when it is first ready.

        Raises:
            EngineError: it died, or was not ready in time, before it was ready for the first time.
        """
        supervisor = self.supervisor
        while True:
            supervisor.starting()
            try:
                await self._live(started)
            except EngineError as error:
                self.down = str(error)
                # A server that was never ready probably has a wrong setting: report it instead of another attempt.
                if not started.is_set():
                    raise
                delay = supervisor.died(self.down)
            if delay is None:
                deaths = supervisor.deaths
                log.error("%s; it is not started again, for it died %d times before it was ready", self.down, deaths)
                return
            log.warning("%s; it is started again in %g s", self.down, delay)
            await supervisor.back_off()

    async def _live(self, started: asyncio.Event) -> NoReturn:
        """Run the server once. Raise EngineError with the reason when it has ended."""
        self._log_start = self.log.stat().st_size
        died = "died while starting"
        async with AsyncExitStack() as stack:
            starting = await stack.enter_async_context(AsyncExitStack())
            await starting.enter_async_context(self.how.gate.start())
            own = process_group(self.command, self.log, self.how.environment, self.how.api_key)
            try:
                self.process = await stack.enter_async_context(own)
            except OSError as error:
                raise EngineError(f"{self.name} could not be started: {error}") from error
            if await self._ready():
                await starting.aclose()
                self.down, died = None, "died"
                self.supervisor.running()
                started.set()
                await self.process.wait()
                self.down = f"{self.name} died"
        assert self.process.returncode is not None
        raise EngineError(f"{self.name} {died} ({exit_of(self.process.returncode)}){self._log_summary()}")

    async def kill(self) -> None:
        """Kill the server, if it runs; it is started again like any server that died."""
        if self.down is None and self.process.returncode is None:
            self.down = f"{self.name} was killed"
            signal_group(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def _ready(self) -> bool:
        """Wait until it answers. Return False if it died."""
        clock = asyncio.get_running_loop().time
        began = reported = clock()
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while not await self._healthy(session):
                if self.process.returncode is not None:
                    return False
                if clock() - began > self.how.ready_timeout:
                    late = f"{self.name} was not ready after {self.how.ready_timeout:g} s (ready_timeout)"
                    raise EngineError(late + self._log_summary())
                if self.how.waiting is not None and clock() - reported >= 1.0:
                    reported = clock()
                    self.how.waiting(self, reported - began)
                await asyncio.sleep(0.2)
        return True

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/health") as response:
                return response.status == 200
        return False

    def _log_summary(self) -> str:
        with open(self.log, "rb") as lines:
            lines.seek(self._log_start)
            text = lines.read().decode(errors="replace")
        # A killed server logs no cause. But SGLang kills itself when one of its processes has failed.
        killed = self.process.returncode == -signal.SIGKILL and "kill_process_tree" not in text
        why = None if killed else cause(text) or last_line(text)
        return f"{f': {why}' if why else ''}; log: {self.log}"


def launch_vllm(
    model: str | Path, how: Launch, *, broadcast: bool = False, ipc: bool = False
) -> AbstractAsyncContextManager[Server]:
    """vLLM on `model`, with everything `connect_vllm` needs.

    Args:
        model: directory or hub name.
        broadcast: make the server able to take weights from an `april.engines.servers.broadcast.Broadcast`.
        ipc: make the server able to take weights from an `april.engines.servers.same_device.SameDevice`.

    Raises:
        EngineError: the server died or did not become ready; with the cause and the path of its log.
    """
    how = how.settled("vllm")
    command = [
        *(str(how.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", how.host, "--port", str(how.port)),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--seed", str(random.randrange(2**31))),  # its default is 0: replicas would draw the same numbers
        *how.arguments,
    ]
    # Dev mode enables weight updates and pauses. By default vLLM closes connections after 5 s of idleness,
    # which fails a request that is sent at that moment.
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600", **how.environment}
    if how.api_key:
        variables["VLLM_API_KEY"] = how.api_key
    # The server's environment need not have april: it gets the one module it needs on a path of its own.
    plugin = Path(how.log_dir).absolute() / f"{how.name}-plugin"
    plugin.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("vllm_worker.py"), plugin / "april_vllm_worker.py")
    path = [str(plugin), *filter(None, [variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    command += ["--worker-extension-cls", "april_vllm_worker.WorkerExtension"]
    if broadcast:
        command += ["--weight-transfer-config", '{"backend": "april"}']
    if ipc:
        command += ["--weight-transfer-config", '{"backend": "ipc"}']
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles are pickles
    return launch(command, replace(how, environment=variables))


@asynccontextmanager
async def launch_sglang(model: str | Path, how: Launch) -> AsyncIterator[Server]:
    """SGLang on `model`, with everything `connect_sglang` needs. Errors as of `launch_vllm`.

    SGLang takes its key as an option or from a file of options, never from the environment: it gets a file that only
    this user can read, and that is gone when the block ends.
    """
    how = how.settled("sglang")
    command = [
        *(str(how.python), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", how.host, "--port", str(how.port)),
        *("--incremental-streaming-output", "--skip-server-warmup"),
        *how.arguments,
    ]
    with tempfile.TemporaryDirectory(prefix="april-") as directory:  # made so that only its owner can enter it
        if how.api_key:
            options = Path(directory) / "options.yaml"
            options.write_text(f"api-key: {json.dumps(how.api_key)}\n")
            command += ["--config", str(options)]
        async with launch(command, how) as server:
            yield server


@asynccontextmanager
async def launch(command: Sequence[str], how: Launch) -> AsyncIterator[Server]:
    """Run any server that answers 200 at `/health` once it is ready, and start it again if it dies.

    Args:
        command: with all its options; nothing is added.
        how: the port is the one that `command` names.
    """
    server = Server(command, how)
    server.log.parent.mkdir(parents=True, exist_ok=True)
    server.log.touch()  # keep the logs of earlier servers of that name
    started = asyncio.Event()
    running = asyncio.create_task(server.keep_running(started), name=f"run {server.name}")
    ready = asyncio.create_task(started.wait())
    try:
        await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
        if not started.is_set():
            running.result()
        yield server
    finally:
        ready.cancel()
        running.cancel()
        # `wait` does not raise the server's error, which would replace an exception of the block.
        await asyncio.wait((running,))


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
