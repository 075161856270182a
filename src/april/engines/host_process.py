"""A process that hosts engines for this one, each behind a channel of its own.

Invariants:
- the process outlives neither `close` nor the process that started it: it ends when its connection closes;
- its log records are logged in this process;
- its death is noticed, also if processes that it has started live on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from april.engines.channel import Channel
from april.engines.child_environment import inherited
from april.engines.connection import Connection
from april.engines.multiplexer import Multiplexer
from april.rollout.engine import EngineError
from april.rollout.patience import patient_timeout

GRACE = 5.0
"""Seconds that a process has to end itself before it is killed."""


class HostProcess:
    """A process that runs `host_process_main`. Make it with `start`.

    Attributes:
        down: why it no longer works; None while it does.
    """

    def __init__(
        self,
        name: str,
        child: asyncio.subprocess.Process,
        connection: Connection,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name = name
        self.down: str | None = None
        self._child = child
        self._connection = connection
        self._on_death = on_death
        self._channels = Multiplexer(connection, lambda reason: self._died(f"{name} died"))
        # The other process uses the first channel that is opened for its log.
        self._channels.open().listen(self._log, lambda reason: None)
        self._ending = asyncio.create_task(self._watch(), name=f"end of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        environment: Mapping[str, str] | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> HostProcess:
        """Start the process.

        Args:
            name: name in messages.
            environment: additional environment variables of the process.
            on_death: called once with the reason if it dies or is killed, but not if it is closed.

        Raises:
            EngineError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "april.engines.host_process_main", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                # The child unpickles loaders, so it must import from the same places as this process.
                env={**inherited(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
                start_new_session=True,  # Ctrl-C is for this process, which ends it
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"{name} could not be started: {error}") from error
        finally:
            # Only the child may hold its end: otherwise its death would not close the connection.
            theirs.close()
        return cls(name, child, await Connection.open(ours), on_death)

    @property
    def pid(self) -> int:
        return self._child.pid

    def channel(self) -> Channel:
        """Open a channel. Its first message is the call of `load` with an `EngineLoader`."""
        return self._channels.open()

    async def _watch(self) -> None:
        await self._child.wait()
        # Its child processes hold its end open. Messages that it had sent can still be received.
        self._connection.end()

    def _log(self, record: tuple[str, int, str]) -> None:
        name, level, text = record
        logging.getLogger(name).log(level, "%s", text)

    def _died(self, reason: str) -> None:
        if self.down is None:
            self.down = reason
            self._channels.close(reason)
            self._on_death(reason)

    def kill(self, reason: str) -> None:
        """Kill the process; all its channels close with `reason`."""
        with suppress(ProcessLookupError):
            self._child.kill()
        self._died(reason)

    async def close(self) -> int:
        """End the process and return its exit status."""
        # Set before the connection closes: this end is no death, and must not call `on_death`.
        self.down = self.down or f"{self.name} has been closed"
        self._channels.close(self.down)
        self._connection.close()
        try:
            async with patient_timeout(GRACE):
                status = await self._child.wait()
        except TimeoutError:
            self._child.kill()
            status = await self._child.wait()
        await asyncio.gather(self._ending, return_exceptions=True)
        return status
