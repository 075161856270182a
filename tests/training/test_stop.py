from __future__ import annotations

import asyncio
import os
import signal

import pytest

from april.training.stop import StopSignals, exit_status
from tests.limits import HANG


async def send(number: int = signal.SIGINT) -> None:
    """Send a signal to this process and let the event loop see it."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_first_signal_requests_a_stop_and_a_second_sigint_aborts(first: int) -> None:
    with StopSignals() as signals:
        assert not signals.requested.is_set()
        await send(first)
        assert signals.requested.is_set()
        assert exit_status(signals.number) == 128 + first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


async def test_sigusr1_requests_a_checkpoint_without_a_stop() -> None:
    with StopSignals() as signals:
        await send(signal.SIGUSR1)
        assert signals.saving.is_set()
        assert not signals.requested.is_set()


async def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            await send(signal.SIGHUP)
            assert not signals.requested.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_stop_can_be_requested_from_any_thread_and_before_the_handlers() -> None:
    early = StopSignals()
    early.stop(signal.SIGPIPE)
    with early, StopSignals() as late:
        assert (early.requested.is_set(), early.number) == (True, signal.SIGPIPE)
        await asyncio.to_thread(late.stop, signal.SIGPIPE)
        await asyncio.wait_for(late.requested.wait(), HANG)


@pytest.mark.parametrize("before", [0, 1])
async def test_held_signals_abort_no_operation(before: int) -> None:
    with StopSignals() as signals:
        for _ in range(before):
            await send()
        with signals.held():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                await send(number)
        assert signals.requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


async def test_held_without_a_signal_has_no_effect() -> None:
    with StopSignals() as signals:
        with signals.held():
            pass
        await send()
        assert signals.requested.is_set()


async def test_former_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


async def test_no_signal_is_handled_outside_the_main_thread() -> None:
    def live() -> bool:
        async def listen() -> bool:
            with StopSignals() as signals, signals.held():
                return signals.requested.is_set()

        return asyncio.run(listen())

    assert not await asyncio.to_thread(live)
