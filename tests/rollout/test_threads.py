"""Functions in threads: they never block the loop, and those that hang are counted and left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from april.rollout.user_code.user_code import HangingError, Threads, UserCodeError
from tests.limits import HANG


async def test_results_and_errors_are_returned() -> None:
    threads = Threads(2, "stop them")
    assert await asyncio.gather(*(threads.call(pow, (2, n), None) for n in range(9))) == [2**n for n in range(9)]
    with pytest.raises(ZeroDivisionError):
        await threads.call(divmod, (1, 0), None)
    with pytest.raises(UserCodeError, match="StopIteration"):
        await threads.call(next, (iter(()),), None)


async def test_hanging_calls_are_abandoned_up_to_a_limit() -> None:
    threads, never = Threads(2, "stop them"), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await threads.call(never.wait, (), 0.01)
    assert threads.hanging == 2
    with pytest.raises(HangingError, match="2 calls hang already: stop them"):
        await threads.call(abs, (-1,), None)
    never.set()
    while threads.hanging:
        await asyncio.sleep(0.001)
    assert await threads.call(abs, (-1,), None) == 1, "those that hung have ended"


async def test_a_cancelled_call_occupies_its_thread_until_it_ends() -> None:
    threads, go, running = Threads(1, "stop them"), threading.Event(), threading.Event()
    first = asyncio.create_task(threads.call(lambda: (running.set(), go.wait()), (), None))
    await asyncio.to_thread(running.wait)
    first.cancel()
    second = asyncio.create_task(threads.call(abs, (-1,), None))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not (await asyncio.wait([second], timeout=0.05))[0]
    assert threads.hanging == 0, "it was cancelled, nobody knows that it hangs"
    go.set()
    assert await second == 1


async def test_threads_are_reused_and_end_with_their_owner() -> None:
    before = threading.active_count()
    threads = Threads(3, "stop them")
    for _ in range(20):
        await asyncio.gather(*(threads.call(abs, (-1,), None) for _ in range(5)))
    assert threading.active_count() <= before + 3
    used = {await threads.call(threading.current_thread, (), None) for _ in range(5)}
    del threads
    for thread in used:
        await asyncio.to_thread(thread.join, HANG)
        assert not thread.is_alive()
