"""Calls that wait for the head of the Ray cluster, which may hang: Ray then waits without end.

Invariants:
- no caller waits for the head longer than `HEAD_SILENCE` seconds; once a call has been given up, later ones wait for
  `BRIEFLY` seconds. Calls that may take long (`wait_for_head`) end when another call has been given up;
- what cannot be released because the head hangs is left to Ray, which releases it after this process has ended;
- a thread in which Ray still waits blocks neither the run nor, with `exit_if_head_hangs`, the end of the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from april.rollout.engine import EngineError
from april.rollout.patience import patient_timeout

HEAD_SILENCE = 20.0
"""Seconds that the head may take to answer."""
BRIEFLY = 1.0
"""Seconds that a head may take that hangs already."""

T = TypeVar("T")

_given_up: list[threading.Thread] = []
"""Threads of calls that were given up. Like Ray's connection to the head, they belong to the process."""


def head_hangs() -> bool:
    """Return whether a call that was given up still waits for the head."""
    return any(thread.is_alive() for thread in _given_up)


async def call_head(work: Callable[..., T], *args: object, seconds: float = HEAD_SILENCE) -> T:
    """Return the result of `work(*args)`, which waits for the head, computed in a thread of its own.

    Raises:
        EngineError: the head does not answer in time; the call is given up.
    """
    answer, thread = _started(work, *args)
    seconds = BRIEFLY if head_hangs() else seconds
    try:
        async with patient_timeout(seconds):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        if answer.done():  # raised by the work itself
            raise
        _given_up.append(thread)
        raise _silent(seconds) from None


def wait_for_head(work: Callable[..., T], *args: object) -> T:
    """Return the result of `work(*args)`, however long a head that answers takes. Blocks the calling thread.

    Raises:
        EngineError: another call has been given up.
    """
    answer, _ = _started(work, *args)
    while not wait((answer,), timeout=BRIEFLY).done:
        if head_hangs():
            raise _silent(HEAD_SILENCE)
    return answer.result()


async def release(work: Callable[..., object], *args: object) -> None:
    """Run `work(*args)`, which ends something that this process has on the cluster; do nothing if the head hangs."""
    with suppress(EngineError):
        await call_head(work, *args)


def exit_if_head_hangs(status: int) -> None:
    """End this process at once if a call still waits for the head.

    Ray's exit handlers would wait for the head too, so a normal exit would never end.
    """
    if head_hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _started(work: Callable[..., T], *args: object) -> tuple[Future[T], threading.Thread]:
    """Start `work(*args)` in a daemon thread; return its future result and the thread."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # a caller that is cancelled must not cancel the future under the thread

    def run() -> None:
        try:
            answer.set_result(work(*args))
        except BaseException as error:
            answer.set_exception(error)

    # A daemon thread and no executor: the interpreter must not wait for it when it exits.
    thread = threading.Thread(target=run, name="call of the cluster's head", daemon=True)
    thread.start()
    return answer, thread


def _silent(seconds: float) -> EngineError:
    return EngineError(f"the head of the Ray cluster has not answered for {seconds:g} s")
