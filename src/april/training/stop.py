"""Signals that stop or save a run.

Invariants:
- a first SIGINT, SIGTERM or SIGHUP requests an orderly stop; a second SIGINT aborts at once;
- SIGUSR1 requests a checkpoint without a stop;
- SIGHUP stays ignored if it was ignored before, as under nohup;
- inside `held`, no signal aborts: an operation that must not be interrupted is finished;
- afterwards each signal has its former handler.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = signal.SIGUSR1
SIGNALS = (*STOPPING, SAVING)


def exit_status(number: int) -> int:
    """Return the exit status of a process ended by signal `number`, by the shell's convention."""
    return 128 + number


def _handled_signals() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]


def unwind_on_signals() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that servers and workers end with this
    process. SIGUSR1 is ignored until a run handles it."""
    for number in _handled_signals():
        if number == SAVING:
            signal.signal(number, signal.SIG_IGN)
        elif number != signal.SIGINT:  # asyncio relies on Python's own handler
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status of a process that the interrupt ends."""
    return exit_status(interrupt.args[0] if interrupt.args else signal.SIGINT)


@contextmanager
def forwarding(send: Callable[[int], None]) -> Iterator[None]:
    """Pass signals for a run to `send` inside, because the run is in another process."""
    before = {number: signal.signal(number, lambda number, _: send(number)) for number in _handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Handles signals inside a `with` block in a running event loop. Outside the main thread it handles none.

    Attributes:
        requested: set when a stop is requested.
        saving: set while a checkpoint is requested.
        number: first signal that requested a stop; SIGINT before.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.saving = asyncio.Event()
        self.number: int = signal.SIGINT
        self._held = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        if self._in_main_thread:
            self._before = {number: signal.getsignal(number) for number in _handled_signals()}
            for number in self._before:
                self._loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        for number, handler in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def stop(self, number: int) -> None:
        """Request a stop as signal `number` does; may be called from any thread, and before `__enter__`."""
        if self._loop is None:
            self._stop(number)
        else:
            self._loop.call_soon_threadsafe(self._stop, number)

    def _receive(self, number: int) -> None:
        if number == SAVING:
            self.saving.set()
            return
        self._stop(number)
        if not self._held:
            self._release_sigint()

    def _stop(self, number: int) -> None:
        if not self.requested.is_set():
            self.number = number
            self.requested.set()

    def _release_sigint(self) -> None:
        """Restore Python's own handling of SIGINT: KeyboardInterrupt."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Treat every SIGINT inside as a request to stop, never as an abort."""
        if not self._in_main_thread:
            yield
            return
        self._held = True
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._receive, signal.SIGINT)
        try:
            yield
        finally:
            self._held = False
            if self.requested.is_set():
                self._release_sigint()
