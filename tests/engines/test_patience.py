"""Time limits count only the time in which this process could have read an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from april.engines.patience import within
from april.engines.servers.stall import StallWatch
from april.simulation.virtual_time import VirtualTimeLoop, run


def block(seconds: float) -> None:
    """Let time pass while the event loop does nothing else, as a long computation in it does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._virtual.now += seconds


def in_turns(turns: int, call: Callable[[], object]) -> None:
    """Call after some turns of the event loop, which an answer takes from the socket to its reader."""
    if turns:
        asyncio.get_running_loop().call_soon(in_turns, turns - 1, call)
    else:
        call()


def test_time_in_which_the_event_loop_was_blocked_does_not_count() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def blocked() -> None:
            block(1000.0)
            in_turns(20, lambda: answer.set_result("alive"))

        loop.call_later(0.5, blocked)
        return await within(8.0, answer)

    assert run(main()) == "alive"


def test_a_missing_answer_ends_the_wait_at_the_time_limit() -> None:
    ended = []

    async def answer() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await within(8.0, answer())
        assert ended == [True], "the call has ended before its limit is reported"
        waiting = asyncio.create_task(within(8.0, answer()))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == [True, True]
        return asyncio.get_running_loop().time()

    assert run(main()) == 9.0


def stalls(events: Callable[[StallWatch, dict[str, bool]], None], until: float) -> list[float]:
    """Return the times of the stalls that a watch of 300 s reports up to the time `until`."""
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        reads = {"on": True}
        watch = StallWatch(300.0, lambda: True, lambda: reads["on"], lambda: times.append(loop.time()))
        watch.arrived()
        watch.start()
        events(watch, reads)
        await asyncio.sleep(until)
        watch.stop()

    run(main())
    return times


def test_a_silent_server_stalls_after_the_time_limit() -> None:
    assert stalls(lambda watch, reads: None, 1000.0) == [300.0]


def test_time_in_which_nothing_is_read_is_no_stall() -> None:
    def consumer_is_behind(watch: StallWatch, reads: dict[str, bool]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(100.0, reads.update, {"on": False})
        loop.call_later(950.0, reads.update, {"on": True})
        loop.call_later(950.0, watch.arrived)

    assert stalls(consumer_is_behind, 1200.0) == []
    assert stalls(consumer_is_behind, 2000.0) == [1250.0], "a stall counts from the time at which reading begins again"


def test_time_in_which_the_event_loop_was_blocked_is_no_stall() -> None:
    def blocked(watch: StallWatch, reads: dict[str, bool]) -> None:
        def long_computation() -> None:
            block(1000.0)
            in_turns(20, watch.arrived)

        asyncio.get_running_loop().call_later(100.0, long_computation)

    assert stalls(blocked, 1350.0) == []
    assert stalls(blocked, 2000.0) == [1400.0]
