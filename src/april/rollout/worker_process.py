"""What makes a process a worker: one that runs functions and environments of the user's."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from april.rollout.secrets import secrets

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def become_worker(keep: Sequence[str]) -> None:
    """Remove variables that look like secrets, compute in one thread, and leave signals of a terminal to the run.

    Args:
        keep: variables that stay.
    """
    for name in secrets(os.environ):
        if name not in keep:
            del os.environ[name]
    os.environ.update(dict.fromkeys(THREADS, "1"))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
