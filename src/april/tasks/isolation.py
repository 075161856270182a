"""Reward functions in worker processes, where one that hangs, crashes or eats memory harms nothing but itself.

Invariants:
- the caller's event loop never waits for a worker: not for its start, nor for its end;
- a call ends within its time limit, counted from when a worker takes it up; the worker of one that does not is killed
  and replaced, and every other call goes on;
- calls are taken up in their order; while one waits and every worker is busy, workers are added one by one, up to the
  most that are allowed: quick rewards keep one process, rewards that hang do not hold up the others;
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
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from april.rollout.rewards import RewardError
from april.rollout.user_code import UserCode, as_failure
from april.rollout.worker_process import become_worker

STATM = Path("/proc/self/statm")
"""Where Linux says how large a process is; its first number is its address space in pages."""
PATIENCE = 0.5
"""Seconds a call waits for a worker before another one is started."""


class WorkerDied(RewardError):
    """The process that computed a reward ended during the call."""


class RewardWorkers:
    """`await workers(*args)` is `function(*args)` in a worker process. Close it, or use it as an async context manager.

    Spawned processes import the main module: a script that makes workers needs `if __name__ == "__main__":`.

    Args:
        function: must pickle; each worker unpickles it once, when it starts. Arguments and results must pickle too.
        most: processes, and thereby calls at a time, at most; by default what `default_most` says. One is started at
            once, another whenever a call has waited `PATIENCE` seconds for its turn.
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
        most: int | None = None,
        time_limit: float | None = 30.0,
        memory_limit: int | None = None,
        keep_env: Sequence[str] = (),
    ) -> None:
        if most is not None and most < 1:
            raise ValueError(f"most = {most}: at least one process must score")
        if time_limit is not None and time_limit <= 0:
            raise ValueError(f"time_limit = {time_limit}: must be positive seconds, or None for no limit")
        if memory_limit is not None and (memory_limit < 1 or not STATM.exists()):
            raise ValueError(f"memory_limit = {memory_limit}: must be positive bytes, and needs Linux")
        self.most = default_most() if most is None else most
        self.time_limit = time_limit
        # The function travels as bytes, so that a worker's environment is set before its modules are imported.
        self._settings = (pickle.dumps(function), time_limit, memory_limit, tuple(keep_env))
        self._workers: set[ProcessPool] = set()
        """A pool of one process each: a call's pool says which process it runs in, and can be waited for alone."""
        self._idle: asyncio.Queue[ProcessPool] = asyncio.Queue()
        self._turns: set[asyncio.Future[ProcessPool]] = set()
        self._calls: set[Future[bytes]] = set()
        self._closed = False
        self._newest_loads: Future[int]
        self._idle.put_nowait(self._start())

    @property
    def processes(self) -> int:
        """Workers that there are by now."""
        return len(self._workers)

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker."""
        return len(self._turns)

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("spawn")
        worker = ProcessPool(1, initializer=_initialise, initargs=self._settings, context=context)
        self._newest_loads = worker.schedule(int)  # a pool starts its process with its first call
        self._workers.add(worker)
        return worker

    def _idle_once_loaded(self, worker: ProcessPool) -> None:
        """A call that waits goes to the first worker that is ready, not to one that still imports."""
        loop = asyncio.get_running_loop()

        def give(_: Future[int]) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._idle.put_nowait, worker)

        worker.schedule(int).add_done_callback(give)

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
        worker = await self._turn()
        if not worker.active:  # its process died between calls
            worker = await self._replaced(worker)
        outcome = await self._outcome(worker, args)
        result, failure, trace = pickle.loads(outcome)
        if failure is not None:
            failure.add_note(f"In the reward worker:\n{trace}")
            raise failure
        return result

    async def _turn(self) -> ProcessPool:
        """A worker that is not busy; every `PATIENCE` seconds until there is one, another is started."""
        turn = asyncio.ensure_future(self._idle.get())
        self._turns.add(turn)
        try:
            while not (await asyncio.wait((turn,), timeout=PATIENCE))[0]:
                if len(self._workers) < self.most and self._newest_loads.done():
                    self._idle_once_loaded(self._start())
            return turn.result()
        except asyncio.CancelledError:
            if not turn.cancel() and not turn.cancelled():
                self._idle.put_nowait(turn.result())
            raise
        finally:
            self._turns.discard(turn)

    async def _replaced(self, worker: ProcessPool) -> ProcessPool:
        self._workers.discard(worker)
        replacement = self._start()
        try:
            await _stop(worker)
        except asyncio.CancelledError:
            self._idle.put_nowait(replacement)
            raise
        return replacement

    async def _outcome(self, worker: ProcessPool, args: Sequence[Any]) -> bytes:
        """What `_call` returns in the process of `worker`, which is idle again after it."""
        call: Future[bytes] = worker.schedule(_call, args=args, timeout=self.time_limit)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        lives = False
        try:
            outcome = await asyncio.wrap_future(call)
            lives = True
            return outcome
        except TimeoutError:
            raise TimeoutError(
                f"the reward function ran past its time limit of {self.time_limit:g} s; its process was replaced"
            ) from None
        except ProcessExpired as error:
            raise WorkerDied(f"the reward function ended its process (exit code {error.exitcode})") from None
        except BrokenProcessPool:
            raise RewardError("a reward worker died while it loaded the reward function, or between calls") from None
        finally:
            if lives or not worker.active:
                self._idle.put_nowait(worker)
            else:
                self._idle_once_loaded(worker)

    async def close(self) -> None:
        """Stop the workers, whatever they are doing; calls under way are cancelled."""
        self._closed = True
        for turn in list(self._turns):
            turn.cancel()
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*map(_stop, self._workers))

    async def __aenter__(self) -> RewardWorkers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _stop(pool: ProcessPool) -> None:
    pool.stop()
    await asyncio.to_thread(pool.join)


def default_most() -> int:
    """Workers at most: a few more than the machine has cores, because what takes long in a reward is often waiting."""
    return min(32, (os.cpu_count() or 1) + 4)


_function: Callable[..., Any]
"""What this worker process calls."""
_seconds: float | None
"""How long a call of it may take."""


def _initialise(function: bytes, time_limit: float | None, memory_limit: int | None, keep_env: Sequence[str]) -> None:
    global _function, _seconds
    become_worker(keep_env)
    try:
        with UserCode():
            _function = pickle.loads(function)
    except Exception as error:  # a worker that fails to start is started again for ever: fail its calls instead
        _function = _raising(error)
    _seconds = time_limit if STATM.exists() else None
    if memory_limit is not None:
        _limit_memory(memory_limit)


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
        return pickle.dumps((None, _portable(as_failure(error)), trace))


def _portable(error: Exception) -> Exception:
    """`error` if it survives pickling."""
    try:
        if isinstance(copy := pickle.loads(pickle.dumps(error)), type(error)):
            return copy
    except Exception:
        pass
    said = RewardError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        said.add_note(note)
    return said
