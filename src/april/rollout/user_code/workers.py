"""Processes for user code, where code that hangs, crashes or takes too much memory harms nothing but its own worker.

Invariants:
- the caller's event loop never waits for a worker: neither for its start nor for its end;
- a call that is cancelled, as by its time limit, ends its worker: nothing else stops user code. Other calls in that
  worker fail with a `WorkerDied` that names the cause;
- a call fails with the exception that the user code raised, or with `WorkerDied`; nothing that a call does, raises or
  returns fails another call;
- workers are spawned, never forked: they have no locks, threads or device contexts of the trainer;
- no variable that looks like a secret is left in a worker's environment when modules of the user are imported;
- a worker ends with the process that started it, however that one ends;
- the end of a worker is noticed, also if processes that it has started live on.

This guards against accidents, not against malice: a worker has the user's rights, and sees files and network. Code that
a model wrote belongs in a sandbox that the user code calls.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from april.rollout.user_code.user_code import UserCode, UserCodeError, as_failure
from april.secrets import secrets

STATM = Path("/proc/self/statm")
"""Where Linux shows how large a process is; the first number is its address space in pages."""
NUMBER_BYTES = 8
"""The number of a call, before its content in both directions: content that cannot be unpickled fails one call."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Function: TypeAlias = Callable[..., Any]


class WorkerDied(UserCodeError):
    """The process of a call ended before it answered.

    Attributes:
        own: whether the call may be the cause. Otherwise another call in the same process was cancelled.
    """

    def __init__(self, message: str, own: bool = True) -> None:
        super().__init__(message)
        self.own = own


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker process.

    Args:
        threads: calls at a time. With 1, functions run in the main thread, where they may set signal handlers.
        cpu_seconds: processor time of a call and of each process that it starts; None for no limit (Linux only).
        memory_bytes: address space in addition to the loaded function; None for no limit (Linux only).
        keep_env: variables that stay although their names look like secrets.
    """

    threads: int = 1
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    keep_env: Sequence[str] = ()


class Worker:
    """A process that calls one function.

    Args:
        load: returns the function; pickled, and called once, in the process. If it fails, every call fails.

    Attributes:
        alive: whether the process may still answer.
        loaded: done once the function is loaded, or the process has ended.
    """

    def __init__(self, load: bytes, limits: WorkerLimits) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load, limits), daemon=True)
        self._calls: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.alive = True
        self.loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="worker process", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    async def call(self, *args: Any) -> Any:
        """Return what the function returns.

        Raises:
            WorkerDied: the process has ended.
            Exception: what the function raised, with the worker's traceback as a note.
        """
        number = next(self._numbers)
        # Before the call is registered, because pickling may fail.
        message = number.to_bytes(NUMBER_BYTES) + pickle.dumps(args)
        outcome: Future[bytes] = Future()
        with self._lock:
            if not self.alive:
                raise WorkerDied("its process has ended", own=False)
            self._calls[number] = outcome
        self._messages.put(message)
        try:
            answer = await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            self._calls.pop(number, None)
            self.kill("another call in its process was cancelled, and the process was ended")
            raise
        value, error = pickle.loads(answer)
        if error is not None:
            raise error
        return value

    def kill(self, reason: str | None = None) -> None:
        """End the process. Calls in progress fail for `reason`, or are cancelled if there is none."""
        self._end_calls(None if reason is None else WorkerDied(reason, own=False))
        self._messages.put(None)
        with suppress(AttributeError, ValueError):  # the process has not started yet, or is gone
            self._process.kill()

    async def ended(self) -> None:
        """Wait until the process is gone."""
        await asyncio.to_thread(self._thread.join)

    def _end_calls(self, error: WorkerDied | None) -> None:
        with self._lock:
            self.alive = False
            calls, self._calls = self._calls, {}
        self._set_loaded()
        for outcome in calls.values():
            if error is None:
                outcome.cancel()
            elif outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)

    def _set_loaded(self) -> None:
        with suppress(InvalidStateError):  # it is set already, perhaps by another thread
            self.loaded.set_result(None)

    def _run(self, theirs: Connection) -> None:
        """Run the thread that starts the process and waits for its end. Two others send and receive."""
        try:
            self._process.start()
        except Exception as error:
            self._end_calls(WorkerDied(f"its process could not be started: {type(error).__name__}: {error}"))
            return
        # While this process holds the worker's end open, the receiver would never see the pipe close.
        theirs.close()
        threading.Thread(target=self._send, name="worker process calls", daemon=True).start()
        receiver = threading.Thread(target=self._receive, name="worker process answers", daemon=True)
        receiver.start()
        # `kill` may have come before the process had started.
        if not self.alive:
            self._process.kill()
        self._process.join()
        # Child processes of the worker hold its end of the pipe open. Messages that it had sent can still be received.
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
        receiver.join()
        self._end_calls(WorkerDied(f"its process ended (exit code {self._process.exitcode})"))
        self._messages.put(None)

    def _send(self) -> None:
        with suppress(OSError, ValueError):  # the process is gone
            while (message := self._messages.get()) is not None:
                self._pipe.send_bytes(message)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            self._pipe.recv_bytes()  # the first message: the function is loaded
            self._set_loaded()
            while True:
                answer = self._pipe.recv_bytes()
                outcome = self._calls.pop(int.from_bytes(answer[:NUMBER_BYTES]), None)
                if outcome is not None and outcome.set_running_or_notify_cancel():
                    outcome.set_result(answer[NUMBER_BYTES:])


def _serve(pipe: Connection, load: bytes, limits: WorkerLimits) -> None:
    """Run in the worker process."""
    _prepare(limits.keep_env)
    try:
        with UserCode():
            function: Function = pickle.loads(load)()
    except Exception as error:
        function = _raising(error)
    if limits.memory_bytes is not None:
        _limit_memory(limits.memory_bytes)
    pipe.send_bytes(b"")
    messages: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, messages), daemon=True).start()
    sending = threading.Lock()

    def answer(message: bytes) -> None:
        content = _answer(message[NUMBER_BYTES:], function, limits.cpu_seconds)
        with sending, suppress(OSError):  # the process that started this one is gone
            pipe.send_bytes(message[:NUMBER_BYTES] + content)

    if limits.threads == 1:
        while True:
            answer(messages.get())
    with ThreadPoolExecutor(limits.threads) as pool:
        while True:
            pool.submit(answer, messages.get())


def _prepare(keep_env: Sequence[str]) -> None:
    """Remove variables that look like secrets, compute in one thread, and leave signals of a terminal to the run."""
    for name in secrets(os.environ):
        if name not in keep_env:
            del os.environ[name]
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _receive(pipe: Connection, messages: SimpleQueue[bytes]) -> None:
    """Run in a thread of the worker process: it ends the process with the process that started it."""
    with suppress(EOFError, OSError):
        while True:
            messages.put(pipe.recv_bytes())
    # `sys.exit` would end only this thread, and the main thread may run code that never returns.
    os._exit(0)


def _answer(args: bytes, function: Function, cpu_seconds: float | None) -> bytes:
    """Return the result and the exception of a call, pickled."""
    try:
        if cpu_seconds is not None:
            _limit_processor_time(cpu_seconds)
        return pickle.dumps((function(*pickle.loads(args)), None))
    except BaseException as error:
        trace = traceback.format_exc()
        failure = _portable(as_failure(error))
        failure.add_note(f"In the worker process:\n{trace}")
        return pickle.dumps((None, failure))


def _raising(error: Exception) -> Function:
    def function(*_: Any) -> Any:
        raise error

    return function


def _limit_memory(memory_bytes: int) -> None:
    import resource

    pages = int(STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_processor_time(seconds: float) -> None:
    """Allow the call that begins now, and each process it starts, `seconds` of processor time more than was used."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    # The soft limit only: a process cannot raise its hard limit again for the next call.
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _portable(error: Exception) -> Exception:
    """Return `error` if it survives pickling, otherwise a `UserCodeError` that names it."""
    try:
        # An exception with its own `__init__` may pickle without error and fail to load in the caller.
        if isinstance(copy := pickle.loads(pickle.dumps(error)), type(error)):
            return copy
    except Exception:
        pass
    named = UserCodeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        named.add_note(note)
    return named
