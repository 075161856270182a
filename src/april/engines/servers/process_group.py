"""A server's processes: one process group, one log, ended with the process that started them.

Invariants:
- a server and everything it spawned is one process group, and no process of it outlives the block, however it ends,
  nor this process, should it be killed;
- the log contains the server's output from its first line on, and never a key.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from april.engines.child_environment import inherited
from april.rollout.patience import patient_timeout

GRACE = 10.0
"""Seconds a server has to end itself before it is killed."""
GUARD = """exec 3<&0; {
    read -r group <&3 && { read -r _ <&3 || { kill -s TERM -- "-$group"; sleep "$1"; kill -s KILL -- "-$group"; }; }
} &"""
"""Shell script that reads a process group's id, and ends the group if standard input closes before another line. It
runs detached, as no child of this process: Ray kills the children of a worker that ends."""


@asynccontextmanager
async def process_group(
    command: Sequence[str], log: Path, environment: Mapping[str, str], secret: str | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command as the leader of its own process group; append its output to `log`, without the secret.

    Raises:
        OSError: it could not be started.
    """
    guard = await _guard()
    try:
        with open(log, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Servers may log their settings, the key included: filter their output.
                stdout=asyncio.subprocess.PIPE if secret else output,
                stderr=asyncio.subprocess.STDOUT,
                # A buffered log may lack its last lines, or have them out of order.
                env={**inherited(), "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
        os.write(guard, f"{process.pid}\n".encode())
        logging = asyncio.create_task(_log(process, log, secret)) if secret else None
        try:
            yield process
        finally:
            try:
                await _stop(process)
            finally:
                # Dismiss the guard only now: until the group has ended, this process may be killed.
                with suppress(BrokenPipeError):
                    os.write(guard, b"done\n")
            if logging is not None:  # a process that has left the group may hold the pipe open
                with suppress(TimeoutError):
                    async with patient_timeout(GRACE):
                        await logging
    finally:
        os.close(guard)


async def _guard() -> int:
    """Start a guard that ends a process group if this process dies. Return its pipe: write the group's id, and later a
    second line when the group has ended."""
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", GUARD, "sh", f"{GRACE:g}"),
            stdin=reader,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        # The shell exits at once; its background part is the guard.
        await process.wait()
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return writer


async def _log(process: asyncio.subprocess.Process, path: Path, secret: str) -> None:
    """Write a server's output to `path`, with stars in place of the secret."""
    assert process.stdout is not None
    hidden, rest = secret.encode(), b""
    with open(path, "ab", buffering=0) as log:
        while data := await process.stdout.read(2**16):
            text = (rest + data).replace(hidden, b"***")
            end = max(0, len(text) - len(hidden) + 1)  # the rest may be the start of a secret
            log.write(text[:end])
            rest = text[end:]
        log.write(rest)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the whole process group: SIGTERM, then SIGKILL. Also if this is cancelled."""
    try:
        if signal_group(process.pid, signal.SIGTERM):
            async with patient_timeout(GRACE):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        # Child processes may survive the leader.
        signal_group(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to all processes of a group. Return False if no process of the group is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
