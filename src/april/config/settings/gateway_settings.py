"""Settings of the gateway through which programs reach the policy."""

from __future__ import annotations

from dataclasses import dataclass

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
        keep_alive_seconds: Seconds between the bytes that keep a waiting client from giving up.
        max_request_megabytes: Size of the largest request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""
    models: tuple[str, ...] = ("policy",)
    keep_alive_seconds: Seconds = 5.0
    max_request_megabytes: Positive[int] = 32
