"""One rank of a run, as its supervisor sees it.

    RUNNING ── exits ────────────> EXITED, FAILED, OUT_OF_MEMORY, CRASHED, KILLED or LOST_PEER
        │
        ├──── no heartbeat ──────> HUNG     (`check`, which kills it)
        └──── `stop` ────────────> STOPPED  (after another rank has ended)

Invariants:
- a rank leaves `RUNNING` once, and its state does not change afterwards, with one exception: a rank that has reported
  that it is out of memory is `OUT_OF_MEMORY` however its process ends;
- after `stop` the process has ended, and its node has its resources back.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from april.training.rank_protocol import EXIT_RANK_LOST

if TYPE_CHECKING:
    from april.engines.ray.node_process import NodeProcess


class RankState(Enum):
    """Whether a rank runs, or why it ended. Members are ordered: of several ranks that ended, the cause is the
    first."""

    OUT_OF_MEMORY = "out of memory"
    """It reported a micro-batch that does not fit; smaller ones may."""
    HUNG = "hung"
    """It sent no heartbeat within the time limit, and was killed."""
    KILLED = "killed"
    """A signal ended it, or its node was lost."""
    CRASHED = "crashed"
    """It reported a fatal condition that a restart may mend."""
    FAILED = "failed"
    """It reported an error that no restart mends."""
    EXITED = "exited"
    """It exited by itself without a report."""
    LOST_PEER = "lost another rank"
    """It exited because another rank was gone."""
    STOPPED = "stopped"
    """The supervisor stopped it after another rank had ended."""
    RUNNING = "running"


CAUSES = list(RankState)


@dataclass(eq=False)
class RankProcess:
    """A rank's process, its reports and its state.

    Args:
        number: the rank.
        process: its process, on this machine or on a node of a cluster.
        status_fd: descriptor from which its heartbeats and reports are read.
        last_heartbeat: time of the last heartbeat; its start before the first.

    Attributes:
        reports: everything the rank has reported, by key (see `commands.rank`).
    """

    number: int
    process: subprocess.Popen[str] | NodeProcess
    status_fd: int
    last_heartbeat: float = field(default_factory=time.monotonic)
    state: RankState = RankState.RUNNING
    reports: dict[str, Any] = field(default_factory=dict)
    _silent: float = 0.0
    _partial_line: bytes = b""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_status(self) -> int:
        """Exit status of the ended process; negative if a signal ended it."""
        return self.process.returncode or 0

    def read_status(self) -> None:
        """Read the heartbeats and reports that have arrived."""
        # Processes that the rank has forked may hold its pipe open after its end: the read must not wait.
        if not select.select([self.status_fd], [], [], 0)[0]:
            return
        data = os.read(self.status_fd, 1 << 16)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self.reports |= json.loads(line)
        # An empty read means that the pipe was closed, which is no heartbeat.
        if data:
            self.last_heartbeat = time.monotonic()

    def check(self, timeout: float) -> RankState:
        """Update the state and return it; kill the rank if its last heartbeat is older than `timeout` seconds."""
        if self.state is not RankState.RUNNING:
            return self.state
        if not self.running:
            self.state = self._ended_as()
        elif self._silence > timeout:
            self.read_status()  # if this process stood still, heartbeats lie in the pipe
            if self._silence > timeout:
                self.process.kill()
                self._silent, self.state = self._silence, RankState.HUNG
        return self.state

    @property
    def _silence(self) -> float:
        """Seconds since the last heartbeat that was read."""
        return time.monotonic() - self.last_heartbeat

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the rank, or is about to because it hung."""
        return self.state is RankState.HUNG or (self.process.poll() or 0) < 0

    def send_signal(self, number: int) -> None:
        """Send a signal to a rank on this machine, if it runs."""
        assert isinstance(self.process, subprocess.Popen)
        if self.running:
            self.process.send_signal(number)

    def stop(self) -> None:
        """Kill the rank if it still runs, and settle its state."""
        running = self.running
        self.process.kill()
        self.process.wait()
        # The last report may still be in the pipe when the process has ended.
        self.read_status()
        if "memory" in self.reports:
            self.state = RankState.OUT_OF_MEMORY
        elif self.state is RankState.RUNNING:
            self.state = RankState.STOPPED if running else self._ended_as()

    def _ended_as(self) -> RankState:
        if "memory" in self.reports:
            return RankState.OUT_OF_MEMORY
        if "died" in self.reports:
            return RankState.CRASHED
        if self.exit_status < 0:
            return RankState.KILLED
        if self.exit_status == EXIT_RANK_LOST:
            return RankState.LOST_PEER
        return RankState.FAILED if "failed" in self.reports else RankState.EXITED

    @property
    def reason(self) -> str:
        """Why the rank ended, for a message."""
        name, lost = f"rank {self.number}", getattr(self.process, "lost", "")
        if died := self.reports.get("died"):
            return f"{name} {died}"
        if lost:
            return f"{name} {lost}"
        if self.state is RankState.HUNG:
            return f"{name} sent no heartbeat for {self._silent:.0f} s"
        if self.exit_status < 0:
            return f"{name} was ended by {signal.Signals(-self.exit_status).name}"
        return f"{name}: {self.reports.get('lost', f'ended with status {self.exit_status}')}"
