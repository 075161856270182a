"""Addresses that servers listen on."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """Return `host` as reached from this machine: the loopback address if the server listens on all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
