"""The embedded engines of all ranks as one: each rank generates on its own copy of the policy.

Orders go over groups of their own, and a thread of each follower carries them out, so that a rank generates while it
writes a checkpoint. It generates nothing while it trains: the leader's loop has nothing in flight then.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from april.engines.embedded import EmbeddedEngine
from april.engines.job import Hands, JobEngine, JobOrder, Reply
from april.engines.rank_exchange import follow_orders
from april.rollout.engine import Chunk
from april.training.rank_protocol import RankLostError
from april.training.ranks import Ranks


class AllRanksEngine(JobEngine):
    """The engines of all ranks, in the leader. Other ranks carry out orders at any time."""

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """As of every engine; and what was forgotten is forgotten on all ranks when this returns."""
        chunks = await super().interrupt(sample_ids)
        if any(member.forget for member in self.members):
            await self._finish(self._begin("interrupt", stop=[]))
        return chunks


@contextmanager
def all_engines(own: EmbeddedEngine, ranks: Ranks) -> Iterator[AllRanksEngine]:
    """The engines of all ranks as one, once each of the others has been told to `start` its own.

    Raises:
        RankLostError: another rank is gone.
    """
    capacities = ranks.exchange.gather(own.capacity)
    try:
        yield AllRanksEngine(ranks.exchange, Hands(own), capacities, own.on_update == "keep", "rank")
    finally:
        with suppress(RankLostError):
            ranks.exchange.scatter([JobOrder("over")] * ranks.world)


class FollowerEngine:
    """Engine of a follower, driven by orders of rank 0.

    Args:
        make: makes the engine on the rank's copy of the policy.
    """

    def __init__(self, make: Callable[[], EmbeddedEngine], ranks: Ranks) -> None:
        self._make = make
        self._ranks = ranks
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the engine, and carry out the leader's orders in a thread until it has no more."""
        engine = self._make()
        self._ranks.exchange.gather(engine.capacity)
        self._thread = threading.Thread(target=self._follow, args=(engine, torch.get_num_threads()), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the leader has no more orders."""
        if self._thread is not None:
            self._thread.join()

    def _follow(self, engine: EmbeddedEngine, threads: int) -> None:
        torch.set_num_threads(threads)  # both are a thread's own
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        hands = Hands(engine)
        # A rank that is lost ends this one by its other thread, which waits for commands.
        with suppress(RankLostError), asyncio.Runner() as runner:
            follow_orders(self._ranks.exchange, lambda order: runner.run(_reply(hands, order)))
            runner.run(engine.close())


async def _reply(hands: Hands, order: JobOrder) -> Reply:
    """What came of an order; a defect of the engine ends the run in good order, by the leader."""
    try:
        return await hands.obey(order)
    except Exception as defect:
        traceback.print_exc()
        return Reply([], 0, hands.engine.capacity, f"{type(defect).__name__}: {defect}")
