"""When something that died is started again, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from april.engines.supervisor import LifeState, RestartPolicy, Supervisor
from april.simulation.virtual_time import run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def supervisor(policy: RestartPolicy) -> tuple[Supervisor, Clock]:
    clock = Clock()
    return Supervisor(policy, clock, clock.sleep), clock


def lives(supervised: Supervisor, clock: Clock, *seconds: float | None) -> list[float | None]:
    """Run lives of these lengths; None is a start that fails. Returns the back-off after each."""
    delays = []
    for length in seconds:
        supervised.starting()
        if length is not None:
            supervised.running()
            clock.now += length
        delays.append(supervised.died("killed"))
    return delays


def test_the_back_off_doubles_up_to_half_a_minute() -> None:
    supervised, clock = supervisor(RestartPolicy(1.0, steady_after=600.0))
    assert lives(supervised, clock, *[5.0] * 7) == [1, 2, 4, 8, 16, 30, 30]
    assert lives(supervised, clock, 600.0, None, 599.0) == [1, 2, 4], "a long life begins it again"
    assert supervised.state is LifeState.BACKING_OFF


def test_the_limit_counts_starts_that_fail_and_a_life_forgives_them() -> None:
    supervised, clock = supervisor(RestartPolicy(0.0, 2, forgiven_after=0.0))
    assert lives(supervised, clock, None, None, 0.0, None, None, 1.0) == [0.0] * 6
    assert lives(supervised, clock, None, None, None) == [0.0, 0.0, None]
    assert (supervised.given_up, supervised.reason, supervised.deaths) == (True, "killed", 3)
    with pytest.raises(AssertionError, match="given up"):
        supervised.starting()


def test_the_limit_counts_short_lives_where_only_long_ones_forgive() -> None:
    supervised, clock = supervisor(RestartPolicy(0.0, 1, forgiven_after=600.0))
    assert lives(supervised, clock, 1.0, 601.0, 1.0) == [0.0, 0.0, 0.0]
    assert lives(supervised, clock, 1.0) == [None]


def test_progress_forgives_deaths_and_some_ends_are_none() -> None:
    supervised, clock = supervisor(RestartPolicy(1.0, 1, forgiven_after=600.0, steady_after=600.0))
    assert lives(supervised, clock, 1.0) == [1.0]
    supervised.starting()
    supervised.running()
    assert supervised.died("a smaller batch comes next", counts=False) == 0.0
    supervised.starting()
    supervised.running()
    supervised.forgive()
    assert supervised.died("killed") == 1.0
    assert lives(supervised, clock, 1.0) == [None]


def test_a_back_off_passes_or_is_ended_by_a_wake() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        supervised = Supervisor(RestartPolicy(8.0), loop.time)
        for waited in (8.0, 16.0):
            began = loop.time()
            supervised.died("killed")
            await supervised.back_off()
            assert loop.time() - began == pytest.approx(waited)
            supervised.starting()
        supervised.died("killed")
        began = loop.time()
        loop.call_later(3.0, supervised.wake)
        await supervised.back_off()
        assert loop.time() - began == pytest.approx(3.0)
        assert supervised.died("killed") == 16.0, "it begins again"
        waiting = asyncio.create_task(supervised.back_off())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
