"""The embedded engine in a process of its own, on a copy of the policy, which generates while the trainer trains.

Invariant: the process ends with the one that started it, however that ends: it is gone once its end of the link is
closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from april.engines.embedded.host import EmbeddedSettings
from april.engines.embedded.remote import RemoteEngine
from april.engines.servers.link import Link
from april.engines.weights import directory_of
from april.rollout.engine import Capacity, EngineError

GRACE = 5.0
"""Seconds that the process has to end itself before it is killed."""
DEAD = "the process of the embedded engine has died: april resume goes on with the run"


class EngineProcess(RemoteEngine):
    """An engine whose work is done in another process. Make it with `start`. Weights come as a directory of
    safetensors."""

    def __init__(self) -> None:
        super().__init__()
        self.process: asyncio.subprocess.Process | None = None

    @classmethod
    async def start(cls, settings: EmbeddedSettings) -> EngineProcess:
        """Start the process and wait until it has loaded the model.

        Raises:
            EngineError: it cannot be started, or refuses the model; the message says why.
        """
        engine = cls()
        ours, theirs = socket.socketpair()
        try:
            engine.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "april.engines.embedded.process_main", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine's process could not be started: {error}") from error
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        _, engine._link = await loop.create_connection(
            lambda: Link(engine._received, lambda: engine._lost(DEAD)), sock=ours
        )
        try:
            engine.capacity = Capacity(*await engine._call("open", settings))
        except BaseException:
            await engine.close()
            raise
        return engine

    def _sent(self, weights: Any) -> Path:
        return Path(directory_of(weights))

    async def close(self) -> None:
        self._down = self._down or "the engine's process has been closed"
        self._link.close()
        if self.process is not None:
            try:
                async with asyncio.timeout(GRACE):
                    await self.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
