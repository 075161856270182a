"""The embedded engine in a process of its own, on a copy of the policy, which generates while the trainer trains.

Invariant: the process ends with the one that started it, however that ends, and when it hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.engines.embedded.host import EmbeddedSettings
from april.engines.embedded.remote import LOADING, RemoteEngine
from april.engines.linked_process import LinkedProcess
from april.engines.replica import ReplicaGoneError
from april.engines.weight_transfer import directory_of
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy

NAME = "the process of the embedded engine"


class EngineProcess(RemoteEngine):
    """An engine whose work is done in another process. Make it with `start`. Weights come as a directory of
    safetensors. As a `Replica` it is gone once its process is: nobody starts it again.

    Attributes:
        process: what does the work.
    """

    name = NAME
    process: LinkedProcess

    def __init__(self, on_update: KVPolicy) -> None:
        super().__init__()
        self.on_update = on_update

    @classmethod
    async def start(cls, settings: EmbeddedSettings, environment: Mapping[str, str] | None = None) -> EngineProcess:
        """Start the process and wait until it has loaded the model.

        Args:
            environment: more variables of the process.

        Raises:
            EngineError: it cannot be started, or refuses the model; the message says why.
        """
        engine = cls(settings.on_update)
        engine.process = await LinkedProcess.start(
            NAME,
            "april.engines.embedded.process_main",
            engine._received,
            lambda: engine._lost(f"{NAME} has died: april resume goes on with the run"),
            environment,
        )
        engine._link = engine.process
        try:
            engine.capacity = Capacity(*await engine._call("open", settings, limit=LOADING))
        except BaseException:
            await engine.close()
            raise
        return engine

    async def check(self) -> None:
        """See that the process lives; one that hangs is found by whoever waits for its tokens."""
        if self._down is not None:
            raise EngineError(self._down)

    async def refresh(self) -> None:
        if self._down is not None:
            raise ReplicaGoneError(self._down)

    async def abandon(self) -> list[Chunk]:
        return await self.interrupt()

    def _sent(self, weights: Any) -> Path:
        return Path(directory_of(weights))

    def _hung(self, reason: str) -> None:
        self.process.kill()
        self._lost(f"{NAME} {reason}, and was killed: april resume goes on with the run")

    async def close(self) -> None:
        self._lost(f"{NAME} has been closed")
        await self.process.close()
