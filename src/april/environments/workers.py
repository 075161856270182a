"""Environments in worker processes, where one that hangs or crashes harms no run.

Invariants:
- the caller's event loop never waits for a process: not for its start, nor for its end;
- a call that is given up, because it took too long, ends its process; the environments that lived there are lost, which
  is no fault of those that were not at work;
- workers are spawned, never forked, and see no variable that looks like a secret.

This guards against accidents, not against malice: a worker has the user's rights.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from april.rollout.called_environment import CalledEnvironment
from april.rollout.environment import Environment, EnvironmentLost, ObservationError, environment_error
from april.rollout.user_code import UserCode, as_failure
from april.rollout.worker_process import become_worker


class EnvironmentWorkers:
    """`workers()` is an environment like `make()`, but in a worker process. Close it, or use it as a context manager.

    Args:
        make: makes an environment; must pickle, or is pickled already.
        most: processes at most. One is started with the first call, another when all are at work.
        threads: calls that one process works on at a time.
        keep_env: variables that environments need although their names look like secrets.
    """

    def __init__(
        self, make: Callable[[], Environment] | bytes, most: int, threads: int = 16, keep_env: Sequence[str] = ()
    ) -> None:
        if most < 1:
            raise ValueError(f"workers = {most}: at least one process must work")
        pickled = make if isinstance(make, bytes) else pickle.dumps(make)
        self._settings = (pickled, threads, tuple(keep_env))
        self._most = most
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []

    def __call__(self) -> Environment:
        return RemoteEnvironment(self, next(self._numbers))

    @property
    def processes(self) -> int:
        return sum(worker.lives for worker in self._workers)

    def place(self) -> _Worker:
        """The process for a new environment."""
        self._workers = [worker for worker in self._workers if worker.lives]
        if len(self._workers) < self._most and all(worker.busy for worker in self._workers):
            self._workers.append(_Worker(*self._settings))
        return min(self._workers, key=lambda worker: (worker.busy, len(worker.environments)))

    def close(self) -> None:
        for worker in self._workers:
            worker.end("the run has ended")

    def __enter__(self) -> EnvironmentWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteEnvironment(CalledEnvironment):
    """An environment in a worker process."""

    def __init__(self, workers: EnvironmentWorkers, number: int) -> None:
        self._workers = workers
        self._number = number
        self._worker: _Worker | None = None

    async def close(self) -> None:
        if self._worker is not None and self._worker.lives:
            await self._call("close")
            self._worker.environments.discard(self._number)

    async def _call(self, method: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = self._workers.place()
            self._worker.environments.add(self._number)
        return await self._worker.call(self._number, method, args)


class EnvironmentHost:
    """`await host(number, method, args)` calls an environment of `workers` by its number; for a caller elsewhere.

    An environment is made with the first call of its number, and forgotten when it is closed.
    """

    def __init__(self, workers: EnvironmentWorkers) -> None:
        self._workers = workers
        self._environments: dict[int, Environment] = {}

    async def __call__(self, number: int, method: str, args: Sequence[Any]) -> Any:
        if number not in self._environments:
            self._environments[number] = self._workers()
        environment = self._environments[number]
        if method == "close":
            del self._environments[number]
        return await getattr(environment, method)(*args)


class _Worker:
    """One process, and the calls it works on."""

    def __init__(self, make: bytes, threads: int, keep_env: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, threads, keep_env), daemon=True)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.environments: set[int] = set()
        self.lives = True
        threading.Thread(target=self._run, args=(theirs,), name="environment worker", daemon=True).start()

    @property
    def busy(self) -> int:
        """Calls under way."""
        return len(self._calls)

    async def call(self, environment: int, method: str, args: Sequence[Any]) -> Any:
        if not self.lives:
            raise EnvironmentLost("its process has ended", own=False)
        number = next(self._numbers)
        message = pickle.dumps((number, environment, method, args))
        answer = self._calls[number] = self._loop.create_future()
        self._messages.put(message)
        try:
            return await answer
        except asyncio.CancelledError:
            self._calls.pop(number, None)  # another call of the same moment may have ended the process
            self.end("another environment in its process did not answer, and the process was ended")
            raise

    def end(self, reason: str) -> None:
        """End the process; calls under way fail through no fault of theirs."""
        self._lose(EnvironmentLost(reason, own=False))
        self._messages.put(None)
        with suppress(AttributeError, ValueError):  # it has not started yet, or is gone
            self._process.kill()

    def _lose(self, error: EnvironmentLost) -> None:
        self.lives = False
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(error)

    def _run(self, theirs: Connection) -> None:
        """The thread that starts the process and sends; another one receives."""
        self._process.start()
        theirs.close()
        receiver = threading.Thread(target=self._receive, name="environment answers", daemon=True)
        receiver.start()
        with suppress(OSError, ValueError):  # the process is gone: whoever receives sees it
            while (message := self._messages.get()) is not None:
                self._pipe.send_bytes(message)
        if not self.lives:
            self._process.kill()
        self._process.join()

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._tell(self._answered, *pickle.loads(self._pipe.recv_bytes()))
        self._process.join()
        self._tell(self._lose, EnvironmentLost(f"its process ended (exit code {self._process.exitcode})"))
        self._messages.put(None)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(function, *args)

    def _answered(self, number: int, kind: str, value: Any) -> None:
        answer = self._calls.pop(number, None)
        if answer is None or answer.done():
            return
        if kind == "lost":
            answer.set_exception(EnvironmentLost(value))
        elif kind == "failed":
            answer.set_exception(ObservationError(value))
        else:
            answer.set_result(value)


def _serve(pipe: Connection, make: bytes, threads: int, keep_env: Sequence[str]) -> None:
    """A worker process."""
    become_worker(keep_env)
    serving = _Serving(pipe, make)
    with ThreadPoolExecutor(threads) as pool, suppress(EOFError):
        while True:
            pool.submit(serving.answer, pipe.recv_bytes())
    os._exit(0)


class _Serving:
    """The environments of a worker process."""

    def __init__(self, pipe: Connection, make: bytes) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._environments: dict[int, Environment] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        try:
            with UserCode():
                self._make: Callable[[], Environment] = pickle.loads(make)
        except Exception as error:
            self._make = _raising(f"it cannot be imported: {type(error).__name__}: {error}")

    def answer(self, message: bytes) -> None:
        number, environment, method, args = pickle.loads(message)
        try:
            reply = pickle.dumps((number, "answer", self._call(environment, method, args)))
        except EnvironmentLost as error:
            reply = pickle.dumps((number, "lost", str(error)))
        except BaseException as error:
            reply = pickle.dumps((number, "failed", environment_error(as_failure(error))))
        with self._sending:
            self._pipe.send_bytes(reply)

    def _call(self, number: int, method: str, args: Sequence[Any]) -> Any:
        if method == "close":
            environment = self._environments.pop(number, None)
        else:
            if number not in self._environments:
                self._environments[number] = self._make()
            environment = self._environments[number]
        function = getattr(environment, method, None)
        if function is None and method in ("state", "restore"):
            raise ObservationError('recovery = "snapshot": the environment has no state() and restore(state)')
        result = None if environment is None or function is None else function(*args)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()
        return result


async def _awaited(value: Any) -> Any:
    with UserCode():
        return await value


def _raising(reason: str) -> Callable[[], Environment]:
    def make() -> Environment:
        raise ObservationError(reason)

    return make
