"""Episodes of programs by their keys: requests that come too early wait, requests that come too late are refused.

Invariants:
- a key of a training episode is refused only if the buffer shows that the episode has ended: until a resumed run has
  replayed its journal, a program that outlived april waits for its episode;
- while the run stops, a request for an episode that continues after a resume gets `Stopping`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from april.rollout.buffer import Buffer
from april.rollout.episodes.agent_episode import AgentEpisode
from april.rollout.episodes.turns import EpisodeOver, Stopping

FORGOTTEN = 1 << 16
"""Ended episodes whose keys are known without the buffer."""
UNKNOWN_SECONDS = 60.0
"""Seconds that a request waits for an episode of which the buffer knows nothing, an evaluation's for example."""
LOOK_SECONDS = 1.0
"""Seconds after which a request that waits looks into the buffer again."""


class KnownEpisodes:
    """Open and ended episodes by their keys.

    Attributes:
        open: the open episodes.
        buffer: returns the buffer with the groups of training episodes.
    """

    def __init__(self) -> None:
        self.open: dict[str, AgentEpisode] = {}
        self.buffer: Callable[[], Buffer] = Buffer
        self._ended: dict[str, None] = {}
        """Keys of episodes that have ended, the latest last."""
        self._stopping = False
        self._changed = asyncio.Event()

    def add(self, episode: AgentEpisode) -> None:
        self.open[episode.key] = episode
        self._ended.pop(episode.key, None)
        self._stopping = False
        self._change()

    def remove(self, episode: AgentEpisode) -> None:
        if self.open.pop(episode.key, None) is not None and not self._stopping:
            self._ended[episode.key] = None
            if len(self._ended) > FORGOTTEN:
                del self._ended[next(iter(self._ended))]

    def stop(self) -> None:
        """The run stops: requests for episodes that have not ended get `Stopping`, those that wait included."""
        self._stopping = True
        self._change()

    async def episode(self, key: str) -> AgentEpisode:
        """Return an open episode, once it is open.

        Raises:
            EpisodeOver: the episode has ended, or there is none.
            Stopping: the run stops.
        """
        now = asyncio.get_running_loop().time
        began = now()
        while (episode := self.open.get(key)) is None:
            over = self._is_over(key)
            if over or (over is None and now() - began >= UNKNOWN_SECONDS):
                raise EpisodeOver("the episode has ended, or there is none with this key")
            if self._stopping:
                raise Stopping("the run stops")
            changed = self._changed
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), LOOK_SECONDS)
        return episode

    def _is_over(self, key: str) -> bool | None:
        """Return whether an episode that is not open has ended; None if that is not known."""
        if key in self._ended:
            return True
        name, _, attempt = key.partition("~")
        group_id, buffer = name.partition(".")[0], self.buffer()
        if not group_id.isdecimal():
            return None
        if int(group_id) not in buffer.groups:
            return int(group_id) < buffer.admitted
        try:
            first = buffer.find(name)
        except KeyError:
            return None
        return first.finish is not None or first.attempt > int(attempt or 0)

    def _change(self) -> None:
        """Wake the requests that wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
