from __future__ import annotations

import asyncio
import os
import signal

import pytest

from april.training.stop import StopSignals


async def send(number: int = signal.SIGINT) -> None:
    """Send a signal to this process and let the event loop see it."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
async def test_a_first_signal_asks_for_a_stop_and_a_second_sigint_gives_up(first: int) -> None:
    with StopSignals() as signals:
        assert not signals.requested.is_set()
        await send(first)
        assert signals.requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("before", [0, 1])
async def test_nothing_is_given_up_while_signals_are_held(before: int) -> None:
    with StopSignals() as signals:
        for _ in range(before):
            await send()
        with signals.held():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                await send(number)
        assert signals.requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


async def test_without_a_signal_held_changes_nothing() -> None:
    with StopSignals() as signals:
        with signals.held():
            pass
        await send()
        assert signals.requested.is_set()


async def test_handlers_go_with_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


async def test_another_thread_has_no_signals() -> None:
    def live() -> bool:
        async def listen() -> bool:
            with StopSignals() as signals, signals.held():
                return signals.requested.is_set()

        return asyncio.run(listen())

    assert not await asyncio.to_thread(live)
