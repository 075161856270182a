from __future__ import annotations

import asyncio
import time

import pytest

from april.simulation.virtual_time import run


def test_a_day_of_sleep_takes_no_time_and_wakes_in_order() -> None:
    async def main() -> tuple[list[str], float]:
        woken: list[str] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(sleeper("late", 86400.0), sleeper("early", 0.25), sleeper("middle", 3600.0))
        return woken, asyncio.get_running_loop().time()

    began = time.monotonic()
    woken, virtual = run(main())
    assert woken == ["early", "middle", "late"]
    assert virtual == pytest.approx(86400.0)
    assert time.monotonic() - began < 60


def test_time_does_not_advance_while_callbacks_are_ready() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def test_a_timeout_is_virtual_too() -> None:
    async def main() -> None:
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(main())


def test_threads_are_waited_for() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run(main()) == 7
