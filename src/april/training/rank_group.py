"""All ranks of a run from one start to their common end.

Invariants:
- all ranks run, or none: `run` returns after every rank has ended;
- the first rank has time to save unfinished rollouts before it is killed.

`run` has three phases: watch the ranks until one of them ends; wait until the others have ended by themselves, up to
`GRACE_SECONDS`; kill the rest. Afterwards `exit_status` and `cause` are valid.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Sequence

from april.training.rank_process import CAUSES, RankProcess, RankState
from april.training.rank_protocol import EXIT_RANK_LOST
from april.training.stop import exit_status

GRACE_SECONDS = 20.0
"""Time for ranks to end by themselves after one has ended."""


class RankGroup:
    """The ranks of one start.

    Args:
        ranks: the processes, the first rank first; they have just been started.
        heartbeat_timeout: seconds without a heartbeat after which a rank counts as hung.
    """

    def __init__(self, ranks: Sequence[RankProcess], heartbeat_timeout: float) -> None:
        self._ranks = ranks
        self._heartbeat_timeout = heartbeat_timeout
        self._leader, *self._followers = ranks
        self._leader_lost = False
        """The first rank was ended by this group, not by itself."""

    def run(self) -> None:
        """Watch the ranks until one of them ends, and end the others."""
        while not any(self._ends_run(rank) for rank in self._ranks):
            self._wait(0.5)
        interrupted = self._wind_down()
        for rank in self._ranks:
            rank.stop()
        terminated = self._leader.exit_status in (-signal.SIGTERM, exit_status(signal.SIGTERM))
        self._leader_lost = self._leader.state is RankState.STOPPED or (interrupted and terminated)

    def _ends_run(self, rank: RankProcess) -> bool:
        """Whether a rank's state ends the group: a follower may exit with status 0 before the first rank."""
        if rank.check(self._heartbeat_timeout) is RankState.RUNNING:
            return False
        return rank is self._leader or rank.state is RankState.HUNG or rank.exit_status != 0

    def _wind_down(self) -> bool:
        """Give the ranks time to end by themselves. If another rank was killed or hung, send SIGTERM to the first rank.

        Returns:
            whether the first rank got the signal.
        """
        # A follower that exited by itself may have seen the first rank exit, which then reports the reason itself.
        interrupted = self._leader.running and any(rank.was_killed for rank in self._followers)
        if interrupted:
            self._leader.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(rank.running for rank in self._ranks):
            self._wait(0.1)
        return interrupted

    def _wait(self, seconds: float) -> None:
        """Read reports for at most `seconds`."""
        ready, _, _ = select.select([rank.status_fd for rank in self._ranks], [], [], seconds)
        for rank in self._ranks:
            if rank.status_fd in ready:
                rank.read_status()
        time.sleep(0.02)  # the descriptor of a rank that has ended is always ready

    @property
    def out_of_memory(self) -> RankProcess | None:
        """The first rank that needs smaller micro-batches."""
        return next((rank for rank in self._ranks if rank.state is RankState.OUT_OF_MEMORY), None)

    @property
    def failed(self) -> list[RankProcess]:
        """Ranks with an error that no restart mends, unless the first rank has ended by itself."""
        own_end = self._leader.exit_status >= 0 and self._leader.exit_status != EXIT_RANK_LOST
        if self.out_of_memory or self._leader_lost or own_end:
            return []
        return [rank for rank in self._ranks if "failed" in rank.reports]

    @property
    def exit_status(self) -> int | None:
        """Exit status of the run; None if the ranks are to be started again."""
        if self.out_of_memory or self._leader_lost:
            return None
        status = self._leader.exit_status
        if status >= 0 and status != EXIT_RANK_LOST:
            return status
        return 1 if self.failed else None

    @property
    def cause(self) -> RankProcess:
        """The rank whose end most likely made the other ranks end."""

        def order(rank: RankProcess) -> tuple[bool, bool, int]:
            stopped = rank is self._leader and self._leader_lost
            succeeded = rank.state is RankState.EXITED and rank.exit_status == 0
            # A leader that this group stopped, or a rank that succeeded, is at most a consequence of the real cause.
            return stopped, succeeded, CAUSES.index(rank.state)

        return min(self._ranks, key=order)
