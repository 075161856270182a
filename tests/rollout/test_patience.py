"""Time limits count only the time in which this process could have read an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from april.engines.servers.stall import StallWatch
from april.rollout.patience import patient_timeout
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


async def waited(answer: asyncio.Future[str]) -> str:
    async with patient_timeout(8.0):
        return await answer


@pytest.mark.parametrize("blocked_at", [0.5, 7.5, 7.999])
def test_time_in_which_the_event_loop_was_blocked_does_not_count(blocked_at: float) -> None:
    async def main() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def blocked() -> None:
            block(1000.0)
            in_turns(20, lambda: answer.set_result("alive"))

        asyncio.get_running_loop().call_later(blocked_at, blocked)
        return await waited(answer)

    assert run(main()) == "alive"


def test_an_answer_that_came_while_the_last_part_was_late_is_read() -> None:
    async def main() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def blocked() -> None:
            block(0.7)  # less than a part of the limit
            in_turns(20, lambda: answer.set_result("alive"))

        asyncio.get_running_loop().call_later(7.9, blocked)
        return await waited(answer)

    assert run(main()) == "alive"


def test_a_missing_answer_ends_the_wait_at_the_time_limit() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await waited(asyncio.get_running_loop().create_future())
        return asyncio.get_running_loop().time()

    assert run(main()) == 8.0


def test_a_missing_answer_ends_the_wait_of_a_loop_that_is_blocked_again_and_again() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()

        def blocked() -> None:
            block(10.0)
            loop.call_soon(blocked)

        blocked()
        with pytest.raises(TimeoutError):
            await waited(loop.create_future())
        return loop.time()

    assert 100 < run(main()) < 1000


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


def test_a_server_stalls_although_the_event_loop_is_blocked_again_and_again() -> None:
    def blocked(watch: StallWatch, reads: dict[str, bool]) -> None:
        def long_computation() -> None:
            block(10.0)
            asyncio.get_running_loop().call_later(0.5, long_computation)

        long_computation()

    (stall,) = stalls(blocked, 2000.0)
    assert 300 < stall < 350
