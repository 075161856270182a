"""A process that this one starts, at the other end of a link.

Invariant: no process outlives `close`, nor the process that started it: it ends once its end of the link is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from april.engines.child_environment import inherited
from april.engines.link import Link
from april.rollout.engine import EngineError

GRACE = 5.0
"""Seconds that a process has to end itself before it is killed."""


class LinkedProcess:
    """A process that runs `python -m MODULE FD`, with FD its end of a socket pair. Make it with `start`."""

    def __init__(self, child: asyncio.subprocess.Process, link: Link) -> None:
        self._child = child
        self._link = link

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        received: Callable[[Any], None],
        lost: Callable[[], None],
        environment: Mapping[str, str] | None = None,
    ) -> LinkedProcess:
        """Start `module`.

        Args:
            name: what messages call it.
            received: called with each message that comes.
            lost: called once it is gone.
            environment: more variables of the process.

        Raises:
            EngineError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**inherited(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
                start_new_session=True,  # Ctrl-C is for this process, which ends it
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"{name} could not be started: {error}") from error
        finally:
            theirs.close()
        _, link = await asyncio.get_running_loop().create_connection(lambda: Link(received, lost), sock=ours)
        return cls(child, link)

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: Any) -> None:
        self._link.send(message)

    def read(self, on: bool) -> None:
        """Take what comes, or let the process feel that it is too much."""
        self._link.read(on)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()

    async def close(self) -> int:
        """End it, and return its exit status."""
        self._link.close()
        try:
            async with asyncio.timeout(GRACE):
                return await self._child.wait()
        except TimeoutError:
            self.kill()
            return await self._child.wait()
