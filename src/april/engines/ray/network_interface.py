"""The network interface of ranks on several machines: the interface with their node's address."""

from __future__ import annotations

import socket
import struct
import sys

from april.engines.servers.address import is_loopback

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


def interfaces(address: str) -> dict[str, str]:
    """Return environment variables that restrict gloo and nccl to that interface; none if it is unknown.

    Args:
        address: address of this machine in Ray's list of nodes.
    """
    name = _interface(address) if sys.platform == "linux" else None
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def _interface(address: str) -> str | None:
    if is_loopback(address):
        return "lo"
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
