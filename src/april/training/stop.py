"""How signals stop a run, or save it.

Invariants:
- a first SIGINT, SIGTERM or SIGHUP asks for a stop in good order, a second SIGINT gives up at once;
- SIGUSR1 asks for a checkpoint, and the run goes on;
- SIGHUP stays ignored where it was, as under nohup;
- inside `held`, no signal gives anything up: what must not be torn apart is finished;
- afterwards each signal has the handler that it had before.
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
    """Exit status of a process that signal `number` ended, by the shell's convention."""
    return 128 + number


def _obeyed() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]


def unwind_on_signals() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that servers and workers end with this
    process; SIGUSR1 does nothing until a run listens."""
    for number in _obeyed():
        if number == SAVING:
            signal.signal(number, signal.SIG_IGN)
        elif number != signal.SIGINT:  # Python's own handler is known to asyncio
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Exit status of a process that the interrupt ends."""
    return exit_status(interrupt.args[0] if interrupt.args else signal.SIGINT)


@contextmanager
def forwarding(send: Callable[[int], None]) -> Iterator[None]:
    """Inside, signals for a run go to `send`: the run is in another process."""
    before = {number: signal.signal(number, lambda number, _: send(number)) for number in _obeyed()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Listens for signals as a context manager, in a running event loop; in a thread other than the main one, to none.

    Attributes:
        requested: set once the run is to stop.
        saving: set while a checkpoint is asked for.
        number: the first signal that asked for a stop; SIGINT before.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.saving = asyncio.Event()
        self.number: int = signal.SIGINT
        self._held = False
        self._listening = threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        if self._listening:
            self._before = {number: signal.getsignal(number) for number in _obeyed()}
            for number in self._before:
                self._loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        for number, handler in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def stop(self, number: int) -> None:
        """Ask for a stop as signal `number` does; may be called from any thread, and before anything listens."""
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
            self._leave_sigint()

    def _stop(self, number: int) -> None:
        if not self.requested.is_set():
            self.number = number
            self.requested.set()

    def _leave_sigint(self) -> None:
        """From here on a SIGINT is Python's own: KeyboardInterrupt."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a SIGINT asks for a stop, however many come."""
        if not self._listening:
            yield
            return
        self._held = True
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._receive, signal.SIGINT)
        try:
            yield
        finally:
            self._held = False
            if self.requested.is_set():
                self._leave_sigint()
