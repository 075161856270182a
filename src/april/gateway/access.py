"""Access of a program to its episode: address, key, and the variables that the clients read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit


class Access(NamedTuple):
    """What a program needs to reach its episode.

    Attributes:
        address: base URL of Anthropic's clients; OpenAI's have `/v1` behind it.
        secret: API key.
        path_address: base URL that contains the secret, for programs with a key of their own.
        model: name of the model.
    """

    address: str
    secret: str
    path_address: str
    model: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the clients read."""
        return {
            "OPENAI_BASE_URL": f"{self.address}/v1",
            "OPENAI_API_KEY": self.secret,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.secret,
            "APRIL_MODEL": self.model,
            **without_proxy(self.address, os.environ),
        }


def without_proxy(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which clients reach an address directly, whatever proxy the environment names."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host for host in given.split(",") if host.strip()]
    if "*" not in hosts and (own := urlsplit(address).hostname or "") not in hosts:
        hosts.append(own)
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))
