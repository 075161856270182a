"""What is asked of the head of the Ray cluster, which may hang: Ray then waits without end.

Invariants:
- nobody waits for the head longer than `HEAD_SILENCE` seconds, or for what may take long until somebody else has done
  so; and only briefly once it has been given up;
- what cannot be given back, since the head hangs, keeps nobody either: Ray takes it once this process has ended;
- a thread in which Ray still waits keeps nobody from going on, and a process that ends by `leave` from ending.
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

HEAD_SILENCE = 20.0
"""Seconds that the head may take to answer."""
BRIEFLY = 1.0
"""Seconds that it may take where it hangs already."""
GIVEN_UP = "given up: the head of the cluster hangs"
"""The name of a thread in which Ray waits for it."""

T = TypeVar("T")


async def ask(work: Callable[..., T], *args: object, seconds: float = HEAD_SILENCE) -> T:
    """What `work(*args)` returns, which asks the head, in a thread of its own.

    Raises:
        EngineError: the head does not answer.
    """
    answer, thread = _begun(work, *args)
    seconds = BRIEFLY if head_hangs() else seconds
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        if answer.done():  # it is the work's own
            raise
        thread.name = GIVEN_UP
        raise _silent(seconds) from None


def await_patiently(work: Callable[..., T], *args: object) -> T:
    """What `work(*args)` returns, however long that takes a head that answers. For a thread that may wait.

    Raises:
        EngineError: the head has been given up meanwhile.
    """
    answer, _ = _begun(work, *args)
    while not wait((answer,), timeout=BRIEFLY).done:
        if head_hangs():
            raise _silent(HEAD_SILENCE)
    return answer.result()


def _begun(work: Callable[..., T], *args: object) -> tuple[Future[T], threading.Thread]:
    """`work(*args)` in a thread that keeps no process from ending, and what will be its result."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # so that whoever no longer waits does not disturb the thread

    def run() -> None:
        try:
            answer.set_result(work(*args))
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="asks the head of the cluster", daemon=True)
    thread.start()
    return answer, thread


def _silent(seconds: float) -> EngineError:
    return EngineError(f"the head of the Ray cluster has not answered for {seconds:g} s")


async def give_back(work: Callable[..., object], *args: object) -> None:
    """`work(*args)`, which ends what this process has on the cluster; not done where the head hangs."""
    with suppress(EngineError):
        await ask(work, *args)


def head_hangs() -> bool:
    """Whether Ray still waits for a head that was given up."""
    return any(thread.name == GIVEN_UP for thread in threading.enumerate())


def leave(status: int) -> None:
    """End this process at once where Ray, which waits for a head that hangs, would keep it from ending."""
    if head_hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
