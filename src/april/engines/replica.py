"""One of several engines that do the same, any of which may die."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from april.engines.wrapped import WrappedEngine
from april.rollout.engine import Chunk, Engine, EngineError, KVPolicy


class ReplicaGoneError(EngineError):
    """The replica does not come back: nobody starts it again."""


@runtime_checkable
class Replica(Engine, Protocol):
    """An engine that may die by itself, be found dead, and come back."""

    name: str
    """What messages call it."""
    on_update: KVPolicy

    async def check(self) -> None:
        """See that it lives and holds the weights it was last given.

        Raises:
            EngineError: it does not, and why.
        """
        ...

    async def refresh(self) -> None:
        """See what it can hold, after it was lost. It has been forgotten what weights it holds.

        Raises:
            ReplicaGoneError: nobody starts it again.
            EngineError: it does not answer.
        """
        ...

    async def abandon(self) -> list[Chunk]:
        """Give up everything in flight without a word to it, and return what had arrived."""
        ...


class LocalReplica(WrappedEngine):
    """An engine in this process, as a replica: it lives as long as the process does."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine)
        self.name = name
        self.on_update: KVPolicy = getattr(engine, "on_update", "recompute")

    async def check(self) -> None:
        """Nothing that could be dead."""

    async def refresh(self) -> None:
        """Nothing that could have changed."""

    async def abandon(self) -> list[Chunk]:
        return await self.engine.interrupt()


def replica_of(engine: Engine, index: int) -> Replica:
    """`engine`, as a replica."""
    return engine if isinstance(engine, Replica) else LocalReplica(engine, f"replica {index}")
