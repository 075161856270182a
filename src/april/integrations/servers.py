"""Inference servers that a framework starts and gives weights.

Invariant: april sends requests to a framework's servers and checks their health; it never changes their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from april.engines.pool import EnginePool
from april.engines.servers.client import HTTPClient
from april.engines.servers.local_model import local_vocab_size
from april.engines.servers.server import ServerEngine
from april.engines.servers.server_api import ServerAPI, ServerInfo
from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.sglang import SGLang
from april.engines.servers.stream import Delta, Stream
from april.engines.servers.vllm import VLLM


class FrameworkServer(ServerEngine):
    """A server that already holds the new weights when `update_weights` is called."""

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Record the version of the weights that the framework has loaded."""
        self.version = version
        self._name_weights()


class _Unlabelled:
    """Mix-in for a server API: ignore the labels that the framework gives its weights, and count versions only."""

    async def label(self) -> str | None:
        return None

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        info: ServerInfo = await super().describe(vocab_size)  # type: ignore[misc]
        return replace(info, label=None)

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        delta: Delta | None = super().read(event, stream)  # type: ignore[misc]
        return None if delta is None else delta._replace(version=None, spans=())


class UnlabelledSGLang(_Unlabelled, SGLang):
    """SGLang, without the labels of its weights."""


class UnlabelledVLLM(_Unlabelled, VLLM):
    """vLLM, without the labels of its weights.

    Args:
        adapter: name of the LoRA adapter that requests are for, if the framework loads one into its servers.
        routes: routes to request; None without router replay.
    """

    def __init__(self, http: HTTPClient, adapter: str | None = None, routes: ServerRoutes | None = None) -> None:
        super().__init__(http, routes=routes)
        self._adapter = adapter

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        info = await super().describe(vocab_size)
        self._model = self._adapter or self._model
        return info


async def connect(urls: Sequence[str], api: Callable[[HTTPClient], ServerAPI], model: str) -> EnginePool:
    """Connect to a framework's servers as one engine.

    Args:
        model: directory of the model that all of them hold.

    Raises:
        EngineError: a server does not answer, or lacks an option that april needs.
    """
    vocab_size = local_vocab_size(model)
    return EnginePool(
        [await FrameworkServer.connect(url, api, vocab_size=vocab_size, stream_interval="auto") for url in urls]
    )
