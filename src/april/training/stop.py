"""How a user stops a run.

Invariants:
- a first SIGINT or SIGTERM asks for a stop in good order, a second SIGINT gives up at once;
- inside `held`, no signal gives anything up: what must not be torn apart is finished;
- afterwards the process has no handler of ours.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Listens for signals as a context manager, in a running event loop; in a thread other than the main one, to none.

    Attributes:
        requested: set once the run is to stop.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._held = False
        self._listening = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopSignals:
        if self._listening:
            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening:
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _stop(self) -> None:
        self.requested.set()
        if not self._held:
            self._leave_sigint()

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
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            self._held = False
            if self.requested.is_set():
                self._leave_sigint()
