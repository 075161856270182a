from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from april.rollout.event_loop import EventLoop


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, even where the process was started with it ignored, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def value() -> int:
    await asyncio.sleep(0)
    return 7


def test_results_and_errors_are_returned_to_the_caller() -> None:
    async def fail() -> None:
        raise LookupError("nothing here")

    with EventLoop() as loop:
        assert loop.run(value()) == 7
        with pytest.raises(LookupError, match="nothing here"):
            loop.run(fail())
        assert loop.run(value()) == 7


async def test_it_works_inside_a_running_event_loop() -> None:
    with EventLoop() as loop:
        assert loop.run(value()) == 7


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_the_running_task_and_waits_for_its_cleanup() -> None:
    cleaned_up = []

    async def endless() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            cleaned_up.append(True)

    with EventLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(endless())
        assert cleaned_up
        assert loop.run(value()) == 7


def test_close_ends_running_tasks() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leave() -> None:
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    loop = EventLoop()
    loop.run(leave())
    loop.close()
    loop.close()
    assert ended
