"""One message for the user when a process of a framework's job has ended.

    WATCHING ── SIGTERM from the launcher ──> print the message, exit with 143 at once
        │
        ├────── error of a lost peer ───────> print the message, raise SystemExit(1)
        └────── any other end ──────────────> restore the signal handler

A launcher such as accelerate ends all processes by SIGTERM as soon as it sees that one has died. It may do so before
another process notices the loss itself, and while that process waits in C++, where Python runs no signal handler.
`sigterm_calls` therefore reads signal numbers from a pipe in a thread (`signal.set_wakeup_fd`).

Invariant: the message is printed once per job, by the first process that knows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread
from typing import Any

from april.integrations.trainer_ranks import TrainerRanks, is_job_loss

TERMINATED = "this process was told to end (SIGTERM), as when another one of the job has ended"
PEER_LOST = "a process of this job has ended, and the others cannot go on without it"


@contextmanager
def peer_loss_reported(job: TrainerRanks, message: Callable[[str], str]) -> Iterator[None]:
    """Print `message(reason)` if another process of the job ends inside the block.

    Raises:
        SystemExit: another process has ended.
    """
    if job.size == 1:
        yield
        return

    def report(reason: str) -> None:
        if job.first("a process has ended"):
            print(message(reason), file=sys.stderr, flush=True)

    with sigterm_calls(lambda: report(TERMINATED)) as ignore_sigterm:
        try:
            yield
        except Exception as error:
            if not is_job_loss(error):
                raise
            ignore_sigterm()  # or the process could end between `first` and the message
            report(PEER_LOST)
            raise SystemExit(1) from None


@contextmanager
def sigterm_calls(report: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM calls `report` in a thread at once, and then ends the process.

    It does nothing if SIGTERM has a handler already, or outside the main thread.

    Yields:
        A function that makes the process ignore SIGTERM from then on.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or current_thread() is not main_thread():
        yield lambda: None
        return

    def read_signals(descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] == signal.SIGTERM:
                    report()
                    os._exit(128 + signal.SIGTERM)

    def handler(*_: Any) -> None:
        """Python needs a handler to write to the pipe; it runs late, in the main thread, and does nothing."""

    def ignore() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    read_end, write_end = os.pipe()
    # `set_wakeup_fd` accepts only a descriptor that does not block.
    os.set_blocking(write_end, False)
    former_wakeup = signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGTERM, handler)
    Thread(target=read_signals, args=(read_end,), daemon=True).start()
    try:
        yield ignore
    finally:
        signal.set_wakeup_fd(former_wakeup)
        os.close(write_end)
        if signal.getsignal(signal.SIGTERM) in (handler, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
