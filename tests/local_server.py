"""A server program on this machine, which listens on the port that it is given."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from april.engines.servers.launch import free_port
from tests.forked import wait_until


@contextmanager
def listening(
    command: Callable[[int], Sequence[str | Path]], environment: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server and yield its URL and its process once it listens; end it with the block.

    Args:
        command: returns the program and its arguments for a port.
        environment: the program's variables.
    """
    port = free_port()
    process = subprocess.Popen(command(port), env=environment)
    try:
        wait_until(lambda: _listens(port), process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
