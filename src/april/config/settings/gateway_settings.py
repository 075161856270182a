"""Settings of the gateway through which programs reach the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    Positive,
    Seconds,
)


@dataclass(kw_only=True)
class GatewaySettings:
    """The gateway: the policy behind the APIs of OpenAI and Anthropic, for the programs of `environment.command`,
    `function` and `url`.

    Args:
        host: Interface of the gateway. Any other than the loopback interface lets other machines in, which need an
            episode's key.
        port: Port of the gateway; 0: any free port. A program that is to outlive april needs a fixed one.
        address: URL of the gateway as programs reach it, if that is not http://HOST:PORT.
        models: Names of models that requests may give; "*" allows all.
        sampling: Temperature of a turn: the recipe's (recipe), or its request's where that has one (request). Training
            then scores the turn's tokens at that temperature. Requests cannot set top_p, top_k and min_p, and the
            recipe must not truncate. recipe: temperatures of requests have no effect and are logged once.
        keep_alive_seconds: Seconds between the bytes that keep a waiting client from giving up.
        max_request_megabytes: Size of the largest request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    models: tuple[str, ...] = ("policy",)
    sampling: Literal["recipe", "request"] = "recipe"
    keep_alive_seconds: Seconds = 5.0
    max_request_megabytes: Positive[int] = 32
