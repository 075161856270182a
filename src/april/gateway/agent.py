"""Programs that drive episodes: a command, an async Python function, or something elsewhere that is given the URL.

Invariants:
- a program belongs to one episode, and ends with it: a command's whole process group is ended, whenever its episode is
  cancelled, and its folder is removed;
- a program gets the address and the key of its own episode, and no other secret of april's;
- a program that fails costs its own episode: the error is one line, and the episode's record holds the end of its
  standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, ClassVar

import aiohttp

from april.gateway.access import Access
from april.gateway.containers import Container, Containers, mounted_folder, usable_engine
from april.gateway.server import Gateway
from april.rollout.episodes.environment import EnvironmentLost, ObservationError, Unrewarded
from april.rollout.episodes.turns import AgentOutcome, AgentStart
from april.rollout.user_code.user_code import LateError, Threads, in_one_line
from april.secrets import without_secrets

WRITTEN = 8192
"""Characters of a program's standard error that its episode's record holds."""
READ = 1 << 20
"""Bytes of a program's output that are read, from its end."""
SCORING = 64
"""Calls of a plain `score` function at a time, and calls that may hang before no further one is begun."""
GRACE = 5.0
"""Seconds that a program has to end after SIGTERM."""


class Program(ABC):
    """A program for all episodes of a run."""

    outlives: ClassVar[bool] = False
    """Whether it may outlive april, and then continues where it was."""

    @abstractmethod
    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        """Run the program for one episode.

        Raises:
            ObservationError: it failed.
            Unrewarded: it ended, and its reward could not be obtained.
            EnvironmentLost: it is gone without an error of its own.
        """

    async def begin(self, run: str) -> None:
        """Prepare for the episodes of a run.

        Args:
            run: name of the run: the same after a crash, other for each other run.
        """
        return

    async def close(self) -> None:
        """End what serves the episodes of the run, once all of them have ended."""
        return


class ProgramAgents:
    """Runs a program for each episode, as `Agents`.

    Args:
        program: the program.
        gateway: the gateway that it reaches its episodes through.
        rewarded: whether the program gives the reward; else its outcome has none, and the task rewards the episode.
        score: rewards the episode instead: called with its record, its conversations (a list of messages for each
            branch) and the values that the program gave, `reward` among them.
        conversations: returns the conversations of an open episode.
        score_timeout: time limit of a call of `score` in seconds, without the wait for a free thread; None: no limit.
    """

    def __init__(
        self,
        program: Program,
        gateway: Gateway,
        rewarded: bool = True,
        score: Callable[..., Any] | None = None,
        conversations: Callable[[str], Any] | None = None,
        score_timeout: float | None = None,
    ) -> None:
        self._program = program
        self._gateway = gateway
        self._rewarded = rewarded
        self._score = score
        self._score_timeout = score_timeout
        self._threads = Threads(SCORING, "give what environment.score waits for a time limit of its own")
        self.conversations = conversations

    @property
    def outlive(self) -> bool:
        return self._program.outlives

    async def run(self, start: AgentStart) -> AgentOutcome:
        return await self._program.play(start, self._gateway.access(start.key))

    async def rewarded(self, start: AgentStart, outcome: AgentOutcome) -> AgentOutcome:
        if self._score is not None and self.conversations is not None:
            given = {"reward": outcome.reward, **outcome.info}
            try:
                arguments = _row(start), self.conversations(start.key), given
                scored = await self._threads.call(self._score, arguments, self._score_timeout)
            except EnvironmentLost:
                raise
            except LateError:
                seconds = f"environment.step_timeout = {self._score_timeout:g} s"
                raise Unrewarded(f"environment.score took longer than {seconds}", outcome.info) from None
            except Exception as error:
                raise Unrewarded(f"environment.score failed: {in_one_line(error)}", outcome.info) from error
            outcome = replace(_outcome(scored, outcome.info), continued=outcome.continued)
        if not self._rewarded:
            return replace(outcome, reward=None)
        if outcome.reward is None:
            raise Unrewarded(
                "the program gave no reward: the last line of a command, the result of a function or the answer of a "
                'URL must be {"reward": NUMBER}, or set environment.reward = "task"'
            )
        return outcome


class CommandProgram(Program):
    """A command. It finds the address and the key in the variables that the clients read, and the episode's record as
    one line of JSON on standard input. The last line that it writes may be `{"reward": 1.0}`, with other values.

    Its working directory is a new folder, which is removed at the end: files that it writes there affect no other
    episode.

    With an image it works in a container, which has the host's network and sees, beside the new folder, the folders
    that the command names by relative paths, and those of its files. `python` and absolute paths are the image's, and
    it gets no variables of april's but those in `keep_env`.

    Args:
        command: the program and its arguments; `python` is april's own interpreter, and relative paths of files start
            at april's working directory.
        keep_env: variables that it gets although their names look like secrets.
        image: image of a container; "": the program works on this machine.
        engine: container engine; "": the first usable one.

    Raises:
        ValueError: the command is empty, this machine has no usable container engine, or a folder cannot be mounted.
    """

    def __init__(self, command: Sequence[str], keep_env: Sequence[str] = (), image: str = "", engine: str = "") -> None:
        if isinstance(command, str) or not command:
            raise ValueError('give a list of words, such as ["python", "my_agent.py"]')
        self._containers = Containers(usable_engine(engine), image) if image else None
        program = (command[0], None) if os.sep not in command[0] else _found(command[0])
        own = (sys.executable, None) if command[0] == "python" and not image else program
        found = [own, *map(_found, command[1:])]
        self._command = [word for word, _ in found]
        self._keep_env = tuple(keep_env)
        self._imports_from = os.getcwd() if "-m" in command else None
        seen = (*(path for _, path in found), self._imports_from)
        self._mounts = sorted({mounted_folder(path) for path in seen if path is not None}) if image else []

    async def begin(self, run: str) -> None:
        if self._containers is not None:
            await self._containers.begin(run)

    async def close(self) -> None:
        if self._containers is not None:
            await self._containers.close()

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        with _folder() as folder, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            container = self._containers.new(os.path.basename(folder)) if self._containers else None
            process = await self._started(access, output, errors, folder, container)
            try:
                await _write(process, _record(start) + b"\n")
                code = await process.wait()
            finally:
                # A client that a signal has ended has not waited for its container.
                left = process.returncode is None or process.returncode < 0
                try:
                    await _end(process)
                finally:
                    if self._containers is not None and container is not None and left:
                        await self._containers.remove(container)
            written = _end_of(errors)[-WRITTEN:]
            info = {"stderr": written} if written.strip() else {}
            if code != 0:
                last = written.strip().rpartition("\n")[2]
                raise ObservationError(f"the program failed: exit code {code}, {last[:200]}", info)
            lines = [line for line in _end_of(output).split("\n") if line.strip()]
            return _outcome(parsed(lines[-1] if lines else ""), info)

    async def _started(
        self, access: Access, output: IO[bytes], errors: IO[bytes], folder: str, container: Container | None
    ) -> asyncio.subprocess.Process:
        command = self._command
        environment = {**without_secrets(os.environ, self._keep_env), **access.environment}
        if self._imports_from is not None:
            paths = (self._imports_from, environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if container is not None:
            command, environment = self._contained(container, access, folder)
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise ObservationError(f"the program {command[0]} cannot be started: {error.strerror}") from None

    def _contained(self, container: Container, access: Access, folder: str) -> tuple[list[str], dict[str, str]]:
        """Return the command line that starts the container, and the environment of the engine's client."""
        kept = {name: os.environ[name] for name in self._keep_env if name in os.environ}
        given = {**kept, **access.environment}
        if self._imports_from is not None:
            given["PYTHONPATH"] = self._imports_from
        command = container.command(self._command, folder, given, self._mounts)
        return command, {**os.environ, **container.environment(given)}


class FunctionProgram(Program):
    """An async function of the user's, on april's event loop: `await play(record, access)`.

    `record` is the episode's record, `access` has the address, the key and the name of the model. The function returns
    the reward, a dict with `reward` and other values, or None.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[[Mapping[str, Any], Access], Awaitable[Any]]) -> None:
        self._function = function

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        return _outcome(await self._function(_row(start), access))


class RemoteProgram(Program):
    """Something elsewhere. april posts the episode's record with `base_url`, `api_key` and `model` to a URL, and the
    answer, `{"reward": 1.0}` for example, ends the episode, however late it comes.

    A service whose program outlived april adds `"continued": true`: the program does not ask again for turns that it
    received before.

    Args:
        url: address of the service.
        headers: headers of the request, for its authorization.
    """

    outlives = True

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no http address")
        self._url = url
        self._headers = dict(headers or {})

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        body = {
            **_row(start),
            "again": start.again,
            "base_url": f"{access.address}/v1",
            "anthropic_base_url": access.address,
            "api_key": access.secret,
            "model": access.model,
        }
        data = json.dumps(body, default=str).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            async with watched_session() as session, session.post(self._url, data=data, headers=headers) as response:
                text = await response.text(errors="replace")
        except aiohttp.ClientError as error:
            raise EnvironmentLost(f"the program at {self._url} is lost: {type(error).__name__}: {error}") from None
        if response.status >= 500:
            raise EnvironmentLost(f"the program at {self._url} answered {response.status}: {text[:200]}")
        if response.status >= 400:
            raise ObservationError(f"the program at {self._url} answered {response.status}: {text[:200]}")
        given = parsed(text)
        continued = isinstance(given, dict) and given.pop("continued", False) is True
        return replace(_outcome(given), continued=continued)


def watched_session(cookies: aiohttp.abc.AbstractCookieJar | None = None) -> aiohttp.ClientSession:
    """Return a session without a time limit of answers, whose connections are of `watched_socket`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=watched_socket),
        cookie_jar=cookies,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
    )


def watched_socket(address: Any) -> socket.socket:
    """Return a socket whose connection ends if the other machine is gone: an answer may take hours."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _row(start: AgentStart) -> dict[str, Any]:
    return {**start.row, "seed": start.seed}


def _record(start: AgentStart) -> bytes:
    return json.dumps(_row(start), default=str).encode()


def parsed(text: str) -> Any:
    """Return the JSON value that a text holds; None if it holds none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _outcome(given: Any, info: Mapping[str, Any] | None = None) -> AgentOutcome:
    """Return the outcome that a program gives: a number, or a mapping with `reward` and other values."""
    more = dict(info or {})
    if isinstance(given, Mapping):
        more |= {str(key): value for key, value in given.items() if key != "reward"}
        given = given.get("reward")
    number = given if isinstance(given, int | float) else None
    return AgentOutcome(None if number is None else float(number), more)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - READ, 0))
    return file.read().decode(errors="replace")


def _found(word: str) -> tuple[str, str | None]:
    """Return a word of a command with its relative path, if it is one of a file, as an absolute path; and the path as
    it was given, if it is one."""
    option, equals, path = word.partition("=") if word.startswith("-") else ("", "", word)
    if not os.path.isabs(path) and (os.path.isfile(path) or (os.sep in path and os.path.exists(path))):
        return option + equals + os.path.abspath(path), path
    return word, None


@contextmanager
def _folder() -> Iterator[str]:
    """A new folder for a program; a large one is removed in a thread."""
    folder = tempfile.mkdtemp(prefix="april-")
    try:
        yield folder
    finally:
        asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, folder, True)


async def _write(process: asyncio.subprocess.Process, record: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # a program need not read its record
        process.stdin.write(record)
        await process.stdin.drain()
    process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and its child processes, also if the grace period is cancelled."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        if process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
