"""Embedded engines of all ranks as one engine: each rank generates on its own copy of the policy.

Orders to engines have their own process groups, and a thread of each follower executes them, so that a rank can
generate while it writes a checkpoint. Ranks do not generate during training: the training loop has no sample in flight
then.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from april.engines.device_turns import DeviceTurns, TurnState
from april.engines.embedded import EmbeddedEngine
from april.engines.job import Exchange, JobEngine, JobOrder, LocalEngineWorker, Reply
from april.engines.rank_exchange import follow_orders
from april.rollout.engine import Capacity, Chunk
from april.rollout.trajectory.sample import Sample
from april.training.rank_protocol import RankLostError
from april.training.ranks import Ranks


class AllRanksEngine(JobEngine):
    """Engines of all ranks, driven by the leader. All of them sleep and wake together."""

    def __init__(
        self,
        job: Exchange,
        worker: LocalEngineWorker,
        capacities: Sequence[Capacity],
        keeps: bool,
        name: str = "process",
    ) -> None:
        super().__init__(job, worker, capacities, keeps, name)
        self.turns = DeviceTurns()

    def submit(self, sample: Sample) -> None:
        assert self.turns.serving, f"the ranks' engines are {self.turns.state.value}: they take no samples"
        super().submit(sample)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        with self.turns.updating():
            await super().update_weights(version, weights)

    async def sleep(self) -> None:
        with self.turns.to(TurnState.INTERRUPTED):
            assert not self._at, "samples are in flight"
        with self.turns.to(TurnState.ASLEEP):
            await self._finish(self._begin("sleep"))
        self._router.forget_homes()

    async def wake_weights(self) -> None:
        with self.turns.to(TurnState.WEIGHTS_AWAKE):
            await self._finish(self._begin("wake_weights"))

    async def wake_kv_cache(self) -> None:
        with self.turns.to(TurnState.SERVING):
            await self._finish(self._begin("wake_kv_cache"))

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Interrupt samples as `Engine.interrupt`; all ranks have freed forgotten samples when this returns."""
        chunks = await super().interrupt(sample_ids)
        if any(member.forget for member in self.members):
            await self._finish(self._begin("interrupt", stop=[]))
        return chunks


@contextmanager
def all_engines(own: EmbeddedEngine, ranks: Ranks) -> Iterator[AllRanksEngine]:
    """Yield the engines of all ranks as one; every follower has been ordered to `FollowerEngine.start` before.

    Raises:
        RankLostError: another rank is gone.
    """
    capacities = ranks.exchange.gather(own.capacity)
    try:
        yield AllRanksEngine(ranks.exchange, LocalEngineWorker(own), capacities, own.on_update == "keep", "rank")
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
        """Make the engine, and execute the leader's orders in a thread until the leader ends this."""
        engine = self._make()
        self._ranks.exchange.gather(engine.capacity)
        self._thread = threading.Thread(target=self._follow, args=(engine, torch.get_num_threads()), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the leader has ended the orders."""
        if self._thread is not None:
            self._thread.join()

    def _follow(self, engine: EmbeddedEngine, threads: int) -> None:
        torch.set_num_threads(threads)  # this and the device are settings of a thread
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        worker = LocalEngineWorker(engine)
        # If a rank is lost, the main thread notices it, too, while it waits for commands, and ends this rank.
        with suppress(RankLostError), asyncio.Runner() as runner:
            follow_orders(self._ranks.exchange, lambda order: runner.run(_reply(worker, order)))
            runner.run(engine.close())


async def _reply(worker: LocalEngineWorker, order: JobOrder) -> Reply:
    """Execute an order. An unexpected error is part of the reply, so that the leader can end the run in order."""
    try:
        return await worker.execute(order)
    except Exception as defect:
        traceback.print_exc()
        return Reply([], 0, worker.engine.capacity, f"{type(defect).__name__}: {defect}")
