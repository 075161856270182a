"""Environments in worker processes, where an environment that hangs or crashes harms no run.

Invariant: a call that is cancelled, because it took too long, ends its process. The other environments in that process
are lost as well, which is not their fault (`EnvironmentLost.own`).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from april.images.received import with_contents
from april.rollout.episodes.environment import (
    CalledEnvironment,
    Environment,
    EnvironmentLost,
    EnvStep,
    ObservationError,
    environment_error,
    holds_images,
)
from april.rollout.user_code.user_code import UserCode, as_failure
from april.rollout.user_code.workers import Worker, WorkerDied, WorkerLimits


class EnvironmentWorkers:
    """`workers()` is an environment like `make()`, but in a worker process. Close it, or use it as a context manager.

    Args:
        make: makes an environment; must pickle, or is pickled already.
        most: largest number of processes. One is started with the first call, another when all of them are busy.
        threads: calls that one process works on at a time.
        keep_env: variables that environments need although their names look like secrets.
    """

    def __init__(
        self, make: Callable[[], Environment] | bytes, most: int, threads: int = 16, keep_env: Sequence[str] = ()
    ) -> None:
        if most < 1:
            raise ValueError(f"workers = {most}: at least one process must work")
        # What makes environments travels as bytes: a worker's environment is set before its modules are imported.
        self._load = pickle.dumps(partial(_Environments, make if isinstance(make, bytes) else pickle.dumps(make)))
        self._limits = WorkerLimits(threads, keep_env=tuple(keep_env))
        self._most = most
        self._numbers = itertools.count()
        self._workers: dict[Worker, set[int]] = {}
        """The processes, each with the numbers of the environments in it."""

    def __call__(self) -> Environment:
        return RemoteEnvironment(self, next(self._numbers))

    @property
    def processes(self) -> int:
        return sum(worker.alive for worker in self._workers)

    def place(self, number: int) -> Worker:
        """Return the process for a new environment."""
        self._workers = {worker: numbers for worker, numbers in self._workers.items() if worker.alive}
        if len(self._workers) < self._most and all(worker.busy for worker in self._workers):
            self._workers[Worker(self._load, self._limits)] = set()
        worker = min(self._workers, key=lambda worker: (worker.busy, len(self._workers[worker])))
        self._workers[worker].add(number)
        return worker

    def forget(self, worker: Worker, number: int) -> None:
        """Forget an environment that is closed."""
        self._workers.get(worker, set()).discard(number)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill("the run has ended")

    def __enter__(self) -> EnvironmentWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteEnvironment(CalledEnvironment):
    """An environment in a worker process."""

    def __init__(self, workers: EnvironmentWorkers, number: int) -> None:
        self._workers = workers
        self._number = number
        self._worker: Worker | None = None

    async def close(self) -> None:
        if self._worker is not None and self._worker.alive:
            await self._call("close")
            self._workers.forget(self._worker, self._number)

    async def _call(self, method: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = self._workers.place(self._number)
        try:
            return await self._worker.call(self._number, method, args)
        except WorkerDied as died:
            raise EnvironmentLost(str(died), died.own) from None


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
        # Forgotten first: a close that fails or is cancelled must not keep the environment.
        if method == "close":
            del self._environments[number]
        return await getattr(environment, method)(*args)


class _Environments:
    """The environments of a worker process, by number. Its calls fail with EnvironmentLost or ObservationError only.

    Args:
        make: makes an environment, pickled.
    """

    def __init__(self, make: bytes) -> None:
        self._environments: dict[int, Environment] = {}
        # One loop for all calls: clients and locks of async environments stay valid between them.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        try:
            with UserCode():
                self._make: Callable[[], Environment] = pickle.loads(make)
        except Exception as error:
            # Reported by every call: without it the process would end, and april would only see it as lost.
            self._make = _raising(f"it cannot be imported: {type(error).__name__}: {error}")

    def __call__(self, number: int, method: str, args: Sequence[Any]) -> Any:
        try:
            return self._call(number, method, args)
        except EnvironmentLost:
            raise
        except BaseException as error:
            raise ObservationError(environment_error(as_failure(error))) from None

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
        return _with_contents(result) if method in ("reset", "step") else result


def _with_contents(result: Any) -> Any:
    """Return what a method has returned with its images as bytes: files are here, and images in memory are large."""
    if isinstance(result, EnvStep) and holds_images(result.observation):
        return replace(result, observation=with_contents(result.observation))
    return with_contents(result) if holds_images(result) else result


async def _awaited(value: Any) -> Any:
    with UserCode():
        return await value


def _raising(reason: str) -> Callable[[], Environment]:
    def make() -> Environment:
        raise ObservationError(reason)

    return make
