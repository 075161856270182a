"""Reward functions in worker processes, where one that hangs, crashes or eats memory harms nothing but itself.

Invariants:
- the caller's event loop never waits for a worker: not for its start, nor for its end;
- a call ends within its time limit, counted from when a worker takes it up; the worker of one that does not is killed
  and replaced, and every other call goes on;
- workers are spawned, never forked: no locks, threads or device contexts of the trainer come with them;
- no variable that looks like a secret is left in a worker's environment when the function's module is imported.

This guards against accidents, not against malice: a worker has the user's rights, and sees files and network. Code that
a model wrote belongs in a sandbox that the reward function calls.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from april.rollout.rewards import RewardError

SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of environment variables that workers do not see."""
SECRET_VALUE = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""Values that workers do not see: addresses with a password in them."""
STATM = Path("/proc/self/statm")
"""Where Linux says how large a process is; its first number is its address space in pages."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RewardWorkers:
    """`await workers(*args)` is `function(*args)` in a worker process. Close it, or use it as an async context manager.

    Spawned processes import the main module: a script that makes workers needs `if __name__ == "__main__":`.

    Args:
        function: must pickle; each worker unpickles it once, when it starts. Arguments and results must pickle too.
        workers: processes, and thereby calls at a time; further calls wait their turn.
        time_limit: seconds a call may run; None for no limit. On Linux no process that a call starts gets much more
            processor time than that either, even if nobody waits for it.
        memory_limit: bytes of address space that calls may take in one worker beyond what it holds after loading
            `function` (Linux only); a call that wants more gets a MemoryError.
        keep_env: variables that the function needs although their names look like secrets (`OPENAI_API_KEY`).

    Raises:
        ValueError: a limit makes no sense.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        workers: int = 2,
        time_limit: float | None = 30.0,
        memory_limit: int | None = None,
        keep_env: Sequence[str] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: at least one process must score")
        if time_limit is not None and time_limit <= 0:
            raise ValueError(f"time_limit = {time_limit}: must be positive seconds, or None for no limit")
        self.time_limit = time_limit
        if memory_limit is not None and (memory_limit < 1 or not STATM.exists()):
            raise ValueError(f"memory_limit = {memory_limit}: must be positive bytes, and needs Linux")
        # The function travels as bytes, so that a worker's environment is set before its modules are imported.
        self._settings = (pickle.dumps(function), time_limit, memory_limit, tuple(keep_env))
        self._workers = workers
        self._calls: set[Future[bytes]] = set()
        self._closed = False
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self._workers, initializer=_initialise, initargs=self._settings, context=context)
        pool.schedule(int)  # a pool starts its workers with its first call: let them load meanwhile
        return pool

    async def __call__(self, *args: Any) -> Any:
        """The function's result.

        Raises:
            TimeoutError: the call ran past the time limit.
            RewardError: the worker process died, or the function raised what cannot be carried over.
            RuntimeError: the workers are closed.
            Exception: what the function raised, with the worker's traceback as a note.
        """
        if self._closed:
            raise RuntimeError("these reward workers are closed")
        if not self._pool.active:  # a worker that dies between calls takes the pool with it
            broken, self._pool = self._pool, self._start()
            await _stop(broken)
        call: Future[bytes] = self._pool.schedule(_call, args=args, timeout=self.time_limit)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            outcome = await asyncio.wrap_future(call)
        except TimeoutError:
            raise TimeoutError(
                f"the reward function ran past its time limit of {self.time_limit:g} s; its process was replaced"
            ) from None
        except ProcessExpired as error:
            raise RewardError(f"the reward function ended its process (exit code {error.exitcode})") from None
        except BrokenProcessPool:
            raise RewardError("a reward worker died while it loaded the reward function, or between calls") from None
        result, failure, trace = pickle.loads(outcome)
        if failure is not None:
            failure.add_note(f"In the reward worker:\n{trace}")
            raise failure
        return result

    async def close(self) -> None:
        """Stop the workers, whatever they are doing; calls under way are cancelled."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        await _stop(self._pool)

    async def __aenter__(self) -> RewardWorkers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _stop(pool: ProcessPool) -> None:
    pool.stop()
    await asyncio.to_thread(pool.join)


_function: Callable[..., Any]
"""What this worker process calls."""
_seconds: float | None
"""How long a call of it may take."""


def _initialise(function: bytes, time_limit: float | None, memory_limit: int | None, keep_env: Sequence[str]) -> None:
    global _function, _seconds
    for name in secrets(os.environ):
        if name not in keep_env:
            del os.environ[name]
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        _function = pickle.loads(function)
    except Exception as error:  # a worker that fails to start is started again for ever: fail its calls instead
        _function = _raising(error)
    _seconds = time_limit if STATM.exists() else None
    if memory_limit is not None:
        _limit_memory(memory_limit)


def secrets(environment: Mapping[str, str]) -> list[str]:
    """The variables of an environment that look like secrets."""
    return [name for name, value in environment.items() if SECRET.search(name) or SECRET_VALUE.search(value)]


def _raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def _limit_memory(memory_limit: int) -> None:
    import resource

    pages = int(STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_limit
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_processor_time(seconds: float) -> None:
    """Allow the call that begins now, and each process it starts, `seconds` of processor time and what was used."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _call(*args: Any) -> bytes:
    """Result, exception and traceback, pickled here: what fails to pickle must fail the call, not the pool."""
    try:
        if _seconds is not None:
            _limit_processor_time(_seconds)
        return pickle.dumps((_function(*args), None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        return pickle.dumps((None, _portable(error), trace))


def _portable(error: BaseException) -> Exception:
    """`error` if it survives pickling; SystemExit and the like must not end the process that waits for the result."""
    try:
        if isinstance(error, Exception) and isinstance(copy := pickle.loads(pickle.dumps(error)), type(error)):
            return copy
    except Exception:
        pass
    return RewardError(f"{type(error).__name__}: {error}")
