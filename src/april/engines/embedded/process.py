"""The embedded engine in a process of its own, on a copy of the policy, which generates while the trainer trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.engines.embedded.settings import EmbeddedSettings
from april.engines.host_process import HostProcess
from april.engines.remote import LOADING_SECONDS, RemoteEngine
from april.engines.replica import ReplicaGoneError
from april.engines.weight_transfer import directory_of
from april.rollout.engine import Chunk, KVPolicy

if TYPE_CHECKING:
    import torch

NAME = "the process of the embedded engine"


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights in a directory of safetensors, to be read in the engine's process."""

    directory: Path

    async def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._read()

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    yield name, file.get_tensor(name)


class EngineProcess(RemoteEngine):
    """An embedded engine in another process. Make it with `start`. Weights come as a directory of safetensors. As a
    `Replica` it is gone once its process is: nothing starts the process again.

    Attributes:
        process: the process that hosts the engine.
    """

    name = NAME

    def __init__(self, process: HostProcess, on_update: KVPolicy) -> None:
        super().__init__()
        self.process = process
        self.on_update = on_update

    @classmethod
    async def start(cls, settings: EmbeddedSettings, environment: Mapping[str, str] | None = None) -> EngineProcess:
        """Start the process and wait until it has loaded the model.

        Args:
            environment: more variables of the process.

        Raises:
            EngineError: it cannot be started, or cannot load the model; the message gives the reason.
        """
        engine = cls(await HostProcess.start(NAME, environment), settings.on_update)
        try:
            engine.capacity = await engine._load(engine.process.channel(), settings, LOADING_SECONDS)
        except BaseException:
            # Also when cancelled: the process would otherwise be left behind.
            await engine.close()
            raise
        return engine

    async def refresh(self) -> None:
        if self._down is not None:
            raise ReplicaGoneError(self._down)

    async def abandon(self) -> list[Chunk]:
        return await self.interrupt()

    def _remote_weights(self, weights: Any) -> SavedWeights:
        return SavedWeights(Path(directory_of(weights)))

    def _lost(self, reason: str) -> None:
        super()._lost(f"{reason}: april resume goes on with the run")

    def _hung(self, reason: str) -> None:
        self.process.kill(f"{NAME} {reason}, and was killed")
        self._lost(f"{NAME} {reason}, and was killed")

    async def close(self) -> None:
        self._disconnect(f"{NAME} has been closed")
        await self.process.close()
