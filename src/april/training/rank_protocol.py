"""What the process of a rank and the agent that started it agree on.

Invariant: nothing here takes long to import, so a rank gives a sign of life as soon as it is there.
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
"""The environment variable that says where ranks meet, as an URL of torch's."""
LISTENER = "APRIL_RENDEZVOUS_SOCKET"
"""Of the first rank, where they meet over the network: the descriptor of the socket that listens there."""
STATUS_FD = "APRIL_AGENT"
"""The environment variable that holds the descriptor on which a rank reports to its agent."""
ON_NODE = "APRIL_ON_NODE"
"""Set for a rank on a node of a cluster: it ends when nobody reads its line."""
NODES = "APRIL_RANK_NODES"
"""Of the first rank: the nodes that the others are on."""
NO_ID = "none"
"""What torchrun calls a job that was given no id."""
EXIT_RANK_LOST = 75
"""The exit status of a rank that lost another one."""
HEARTBEAT_SECONDS = 1.0
"""Between two signs of life."""


class RankLostError(Exception):
    """Another rank died, or did not come in time: what was under way is undone, and the ranks have to start anew."""


def is_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Whether this process is the first rank, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def nodes_of_ranks() -> frozenset[str]:
    """The nodes of a cluster that other ranks of this run are on."""
    return frozenset(os.environ.get(NODES, "").split())


def torchrun_id() -> str | None:
    """The id of torchrun's job, which ranks that it starts anew have, too; None if it has none of its own."""
    own = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
    return None if own == NO_ID else own


def torchrun_restarts() -> bool:
    """Whether torchrun starts ranks anew when some are lost."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


class StatusReporter:
    """A rank's line to its agent: a sign of life every second, and why it ends."""

    def __init__(self) -> None:
        line = os.environ.get(STATUS_FD)
        self._descriptor = None if line is None else int(line)
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)
            threading.Thread(target=self._live, daemon=True).start()

    def say(self, otherwise: str = "", **what: Any) -> None:
        """Tell the agent `what`; without one, as under torchrun, print the line `otherwise`, for the user."""
        if self._descriptor is None and otherwise:
            print(f"april: rank {os.environ.get('RANK', 0)}: {otherwise}", file=sys.stderr, flush=True)
        elif self._descriptor is not None:
            os.write(self._descriptor, (json.dumps(what) + "\n").encode())

    def _live(self) -> None:
        try:
            while True:
                self.say()
                time.sleep(HEARTBEAT_SECONDS)
        except BrokenPipeError:
            # The first rank stops the run; others on its machine do not hear it, and end with it.
            os.kill(os.getpid(), signal.SIGKILL if ON_NODE in os.environ else signal.SIGTERM)
