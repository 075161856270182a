"""An actor on a node that runs a program, such as a rank of the trainer, and forwards its reports.

Invariants:
- the program ends with its actor, however that ends, because its pipe breaks;
- `ping` is answered as long as the actor's process and its node run.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ray

from april.engines.ray.network_interface import interfaces
from april.engines.ray.node_requirements import NodeRequirements

ENDED_WITHIN = 1.0
"""Seconds after which the end of a program is noticed that does not close its pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """A Python program that runs on a node.

    Args:
        module: module to run by `python -m`.
        requirements: requirements for the node.
        directory: working directory, if it exists on the node.
        line: environment variable for the descriptor that the program writes reports to.
    """

    module: str
    requirements: NodeRequirements
    directory: str
    line: str


class OpenedNode(NamedTuple):
    """A node that can run the program.

    Args:
        missing: unmet requirement of the node, with the remedy; empty if it meets all.
        gpus: GPUs that Ray has assigned to the program, by their names in visibility variables.
    """

    missing: str
    gpus: tuple[str, ...]


class ProcessActor:
    """Runs the program that `settings` describe, once."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._life = 0
        self._process: subprocess.Popen[str]
        self._line: int

    async def ping(self) -> int:
        """Return the life that it is in."""
        return self._life

    async def open(self, life: int) -> OpenedNode:
        """Check the node; nothing is started yet."""
        self._life = life
        missing = await asyncio.to_thread(self._settings.requirements.missing)
        return OpenedNode(missing, tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))

    async def start(self, environment: Mapping[str, str], stdin: str, log: Path) -> None:
        """Start the program. Its output is appended to `log`.

        Args:
            environment: variables on top of the node's own.
            stdin: the program's standard input.

        Raises:
            OSError: it cannot be started, or the log not be written.
        """
        own = self._settings
        self._line, theirs = os.pipe()
        try:
            with log.open("a") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", own.module],
                    cwd=own.directory if os.path.isdir(own.directory) else None,
                    # The node's variables replace the interfaces that april found; the run's replace both.
                    env={**interfaces(ray.util.get_node_ip_address()), **os.environ, **environment}
                    | {own.line: str(theirs)},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    text=True,
                    pass_fds=[theirs],
                    process_group=0,
                )
        finally:
            # `read` finds the end of the reports only if the program alone holds this end.
            os.close(theirs)
        assert self._process.stdin is not None
        # In a thread: the write blocks if the program does not read and the pipe is full.
        await asyncio.to_thread(self._process.stdin.write, stdin)
        self._process.stdin.close()

    async def read(self) -> tuple[bytes, int | None]:
        """Wait for the next report; at the program's end return no data and the exit status."""
        data = await asyncio.to_thread(self._read)
        return data, None if data else await asyncio.to_thread(self._process.wait)

    def _read(self) -> bytes:
        # Processes that the program has forked may hold the pipe open after its end.
        ended = False
        while not select.select([self._line], [], [], 0 if ended else ENDED_WITHIN)[0]:
            if ended:
                return b""
            ended = self._process.poll() is not None
        return os.read(self._line, 1 << 16)

    async def kill(self) -> None:
        """End the program at once."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
