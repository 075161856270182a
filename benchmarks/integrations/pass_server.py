"""The servers of `tests/integrations/model_server.py`, which generate by passes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from passes import LOGPROB, LONGEST, Passes

from tests.integrations.model_server import ModelServer, SGLangServer, VLLMServer


class PassServer(ModelServer):
    """A server. Events of a stream contain the requested number of tokens, as with real servers.

    Args:
        path: path of the model that it reports.
    """

    def __init__(self, path: Path, passes: Passes) -> None:
        self.passes = passes
        super().__init__(path, slots=passes.slots, context_length=1024)

    def _middlewares(self) -> list[Any]:
        @web.middleware
        async def hear(request: web.Request, handler: Any) -> Any:
            self.passes.hear()
            return await handler(request)

        return [hear]

    async def _respond(
        self, request: web.Request, id: str, params: dict[str, Any], stream: bool, ids: list[int]
    ) -> Any:
        self.asked += 1
        self.running.add(id)
        drawn: list[tuple[int, float]] = []
        try:
            if not stream:
                parts = [part async for part in self.passes.respond(id, ids, LONGEST)]
                drawn = [(token, LOGPROB) for tokens, _ in parts for token in tokens]
                return web.json_response(self._event(drawn, drawn, parts[-1][1]))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for tokens, reason in self.passes.respond(id, ids, params.get("stream_interval", 1)):
                new = [(token, LOGPROB) for token in tokens]
                drawn += new
                await response.write(f"data: {json.dumps(self._event(new, drawn, reason))}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.running.discard(id)

    async def _abort(self, request: web.Request) -> web.Response:
        answer: web.Response = await super()._abort(request)  # type: ignore[misc]
        self.passes.abort(self.aborted)
        return answer

    def train(self, sequences: list[list[int]], ticks: int) -> dict[str, Any]:
        """A training step on these samples. Any thread may call it, which then waits."""
        return asyncio.run_coroutine_threadsafe(self._train(sequences, ticks), self._loop).result()

    async def _train(self, sequences: list[list[int]], ticks: int) -> dict[str, Any]:
        seen = self.passes.consumed(sequences)
        await self.passes.train(ticks)
        return seen


class VLLMPasses(PassServer, VLLMServer):
    """Receives the trainer's notifications of new weights."""


class SGLangPasses(PassServer, SGLangServer):
    """Counts the weights that it is given."""

    async def _pause(self, request: web.Request) -> web.Response:
        answer = await super()._pause(request)
        self.passes.abort(self.aborted)
        return answer

    async def _load(self, request: web.Request) -> web.Response:
        self.passes.version += 1
        return web.json_response({"success": True})
