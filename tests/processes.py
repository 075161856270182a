"""The processes of this machine, and where they listen; by /proc, so on Linux alone."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"
"""The state of such a socket in /proc/net/tcp."""


def processes() -> dict[int, tuple[int, str]]:
    """Every process: its parent and its name."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(directory.name)] = parent, (directory / "cmdline").read_text().replace("\0", " ").strip()
    return found


def below(pid: int) -> Iterator[int]:
    """A process and all that it started, the first first."""
    alive = processes()
    tree = [pid]
    for parent in tree:
        tree += [child for child, (its_parent, _) in alive.items() if its_parent == parent]
    yield from tree


def reachable(pids: Iterable[int]) -> dict[str, bool]:
    """Where these processes listen for connections by TCP ("HOST:PORT"), and whether other machines reach that."""
    own = {socket for pid in pids for socket in _sockets(pid)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENS and inode in own:
                host, port = local.split(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                address = ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words))
                plain = getattr(address, "ipv4_mapped", None) or address
                found[f"{plain}:{int(port, 16)}"] = not plain.is_loopback
    return found


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of a process's sockets."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(descriptor).partition(":")
                if kind == "socket":
                    yield inode.strip("[]")
