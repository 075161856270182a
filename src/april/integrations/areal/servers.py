"""AReaL's inference servers: SGLang and vLLM, with LoRA adapters that AReaL names by their version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from areal.api.cli_args import PPOConfig
from areal.api.io_struct import get_versioned_lora_name

from april.engines.servers.client import HTTPClient
from april.engines.servers.server_api import ServerAPI
from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.stream import Stream
from april.integrations.completions import VLLMCompletions
from april.integrations.servers import UnlabelledSGLang


class ArealSGLang(UnlabelledSGLang):
    """SGLang as AReaL starts it.

    Args:
        lora: AReaL's name of the adapter, if it trains one.
        routes: routes to request; None without router replay.
    """

    def __init__(self, http: HTTPClient, lora: str | None, routes: ServerRoutes | None = None) -> None:
        super().__init__(http, routes)
        self._lora = lora

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        body: dict[str, Any] = super().body(stream, salt)
        if self._lora is not None:
            body["lora_path"] = get_versioned_lora_name(self._lora, stream.version)
        return body


class ArealVLLM(VLLMCompletions):
    """vLLM as AReaL starts it."""

    def __init__(self, http: HTTPClient, lora: str | None, slots: int) -> None:
        super().__init__(http, slots)
        self._lora = lora

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        body = super().body(stream, salt)
        if self._lora is not None:
            body["model"] = get_versioned_lora_name(self._lora, stream.version)
        return body


def server_api(config: PPOConfig, routes: ServerRoutes | None = None) -> Callable[[HTTPClient], ServerAPI]:
    """Return the API of the servers that AReaL starts."""
    lora = config.gconfig.lora_name if config.rollout.use_lora else None
    if config.rollout.backend.startswith("vllm"):
        return partial(ArealVLLM, lora=lora, slots=config.vllm.max_num_seqs)
    return partial(ArealSGLang, lora=lora, routes=routes)
