"""Protocol between a rank's process and its supervisor: environment variables, exit status, heartbeats and reports.

Invariant: this module imports fast, so that a rank sends its first heartbeat as soon as it has started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

RENDEZVOUS = "APRIL_RENDEZVOUS"
"""Environment variable with the URL of the rendezvous, in torch's format."""
LISTENER = "APRIL_RENDEZVOUS_SOCKET"
"""Environment variable of the first rank: descriptor of the listening socket of a TCP rendezvous."""
STATUS_FD = "APRIL_AGENT"
"""Environment variable with the descriptor for heartbeats and reports to the supervisor."""
ON_NODE = "APRIL_ON_NODE"
"""Environment variable set for ranks on nodes of a cluster: such a rank ends when its status descriptor is closed."""
NODES = "APRIL_RANK_NODES"
"""Environment variable of the first rank: for each other rank, the id of its node and the names of its GPUs there, as
NODE=GPU,GPU."""
NO_ID = "none"
"""torchrun's id of a job without one."""
EXIT_RANK_LOST = 75
"""Exit status of a rank that lost another rank."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""


class RankLostError(Exception):
    """Another rank died or did not join in time: the current operation is void, and all ranks have to start again."""


def is_rank() -> bool:
    """Whether this process is one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Whether this process is rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def places_of_ranks() -> list[tuple[str, tuple[str, ...]]]:
    """Return the node of a cluster of each of the run's other ranks, and the names of its GPUs there."""
    places = (entry.partition("=") for entry in os.environ.get(NODES, "").split())
    return [(node, tuple(filter(None, gpus.split(",")))) for node, _, gpus in places]


def torchrun_id() -> str | None:
    """Return the id of torchrun's job, which is the same after restarts; None if the user gave it no id."""
    own = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
    return None if own == NO_ID else own


def torchrun_restarts() -> bool:
    """Whether torchrun restarts ranks when one is lost."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


class StatusReporter:
    """Sends heartbeats, and a report of why the rank ends, to the supervisor."""

    def __init__(self) -> None:
        line = os.environ.get(STATUS_FD)
        self._descriptor = None if line is None else int(line)
        if self._descriptor is not None:
            # Processes that the rank starts must not keep the pipe open after the rank has ended.
            os.set_inheritable(self._descriptor, False)
            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def report(self, otherwise: str = "", **reports: Any) -> None:
        """Send `reports` to the supervisor; without a supervisor, as under torchrun, print `otherwise` for the user."""
        if self._descriptor is None and otherwise:
            print(f"april: rank {os.environ.get('RANK', 0)}: {otherwise}", file=sys.stderr, flush=True)
        elif self._descriptor is not None:
            os.write(self._descriptor, (json.dumps(reports) + "\n").encode())

    def _send_heartbeats(self) -> None:
        try:
            while True:
                self.report()
                time.sleep(HEARTBEAT_SECONDS)
        except BrokenPipeError:
            # The supervisor is gone. Rank 0 stops the run in order; other ranks ignore SIGTERM and end with it.
            os.kill(os.getpid(), signal.SIGKILL if ON_NODE in os.environ else signal.SIGTERM)
