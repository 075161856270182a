"""A server's processes: one group, one log, and no way to outlive whoever started them.

Invariants:
- a server and everything it spawned is one process group, and no process of it outlives the block, however it ends,
  nor this process, should it be killed;
- the log holds what the server said from its first line on, and a key is never in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from april.engines.child_environment import inherited

GRACE = 10.0
"""Seconds a server has to end itself before it is killed."""
GUARD = """exec 3<&0; {
    read -r group <&3 && { read -r _ <&3 || { kill -s TERM -- "-$group"; sleep "$1"; kill -s KILL -- "-$group"; }; }
} &"""
"""A shell that reads a process group, and ends it if its standard input ends before another line came. It is nobody's
child: Ray kills the children of a worker that ends."""


@asynccontextmanager
async def process_group(
    command: Sequence[str], log: Path, environment: Mapping[str, str], secret: str | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command as the leader of a group of its own; what it says is appended to `log`, without the secret.

    Raises:
        OSError: it could not be started.
    """
    guard = await _guard()
    try:
        with open(log, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Servers are known to log their settings, key and all: what they say then goes through here.
                stdout=asyncio.subprocess.PIPE if secret else output,
                stderr=asyncio.subprocess.STDOUT,
                # A log that is buffered lacks its last lines, or has them in another order.
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
                with suppress(BrokenPipeError):
                    os.write(guard, b"done\n")
            if logging is not None:  # what has left the process group may hold its end open
                with suppress(TimeoutError):
                    await asyncio.wait_for(logging, GRACE)
    finally:
        os.close(guard)


async def _guard() -> int:
    """Start a process that ends a process group, should this process end before it says that it is done; the pipe on
    which it is told first the group, and then that."""
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", GUARD, "sh", f"{GRACE:g}"),
            stdin=reader,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await process.wait()
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return writer


async def _log(process: asyncio.subprocess.Process, path: Path, secret: str) -> None:
    """Write what a server says to `path`, with stars where the secret stood."""
    assert process.stdout is not None
    hidden, rest = secret.encode(), b""
    with open(path, "ab", buffering=0) as log:
        while data := await process.stdout.read(2**16):
            text = (rest + data).replace(hidden, b"***")
            end = max(0, len(text) - len(hidden) + 1)  # the rest may be the beginning of a secret
            log.write(text[:end])
            rest = text[end:]
        log.write(rest)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the whole process group: politely, then not. Cancelling this does not spare the group."""
    try:
        if _signal_group(process.pid, signal.SIGTERM):
            async with asyncio.timeout(GRACE):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        # What the server spawned may survive its leader.
        _signal_group(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


def _signal_group(group: int, number: signal.Signals) -> bool:
    """False if nothing is left of the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
