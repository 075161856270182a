"""Replica: one of several engines with the same model, each of which may die."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from april.engines.device_turns import SleepingEngine
from april.rollout.engine import Chunk, Engine, EngineError, KVPolicy
from april.rollout.wrapped_engine import WrappedEngine


class ReplicaGoneError(EngineError):
    """The replica is dead, and is not started again."""


@runtime_checkable
class Replica(Engine, Protocol):
    """An engine that may die by itself, be found dead, and come back."""

    name: str
    """Its name in messages."""
    on_update: KVPolicy

    async def check(self) -> None:
        """Check that it is alive and holds the weights that it was last given.

        Raises:
            EngineError: the check failed; the message contains the reason.
        """
        ...

    async def refresh(self) -> None:
        """Read its capacity again after it was lost. It may hold any weights.

        Raises:
            ReplicaGoneError: it is not started again.
            EngineError: it does not answer.
        """
        ...

    async def abandon(self) -> list[Chunk]:
        """Give up everything in flight without calling the replica, and return the tokens that had arrived."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """An engine that scores tokens, to show which policy it computes."""

    name: str

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1 without truncation.

        Raises:
            EngineError: it did not answer.
        """
        ...


@runtime_checkable
class SleepingReplica(Replica, SleepingEngine, Scorer, Protocol):
    """A replica that can give the memory of its devices to the trainer.

    `check` neither runs a request on a replica that sleeps nor compares its weights. `refresh` is called only after it
    was restarted.
    """

    async def kill(self) -> None:
        """Kill its process: after a call that failed halfway, the memory that it holds is unknown. It is started again
        when the trainer is off the devices."""
        ...


class LocalReplica(WrappedEngine):
    """Engine in this process as a replica. It lives as long as the process."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine)
        self.name = name
        self.on_update: KVPolicy = getattr(engine, "on_update", "recompute")

    async def check(self) -> None:
        """It is alive."""

    async def refresh(self) -> None:
        """Nothing can have changed."""

    async def abandon(self) -> list[Chunk]:
        return await self.engine.interrupt()


def replica_of(engine: Engine, index: int) -> Replica:
    """Return `engine` as a replica."""
    return engine if isinstance(engine, Replica) else LocalReplica(engine, f"replica {index}")
