"""A proxy between client and real server that breaks the generate requests that go through it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import aiohttp
from aiohttp import web

Fault = Literal["none", "refuse", "cut", "half a line", "nonsense", "slow", "any"]

FAULTS: list[Fault] = ["refuse", "cut", "half a line", "nonsense", "slow"]

GENERATE = ("/generate", "/inference/v1/generate")


class FaultProxy:
    """Forwards everything to `target`; generate requests meet `fault` with probability `chance`.

    - refuse: HTTP 500;
    - cut: the connection breaks after a random number of bytes;
    - half a line: the stream ends, properly, in the middle of an event;
    - nonsense: an event comes whose token ids are no token ids;
    - slow: every piece of the stream waits `delay` seconds;
    - any: one of these, at random.

    `hang` and `close` concern all requests, until `go_on`.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = target
        self.fault: Fault = "none"
        self.chance = 1.0
        self.delay = 0.02
        self.met: Counter[Fault] = Counter()
        self.url = ""
        self._random = random.Random(seed)
        self._http: aiohttp.ClientSession
        self._open = True
        self._going = asyncio.Event()
        self._going.set()
        self._connections: set[asyncio.Transport] = set()

    def hang(self) -> None:
        """Forward nothing any more, and close nothing."""
        self._going.clear()

    def close(self) -> None:
        """Cut every connection, and each new one."""
        self._open = False
        for connection in self._connections:
            connection.abort()

    def go_on(self) -> None:
        self._open = True
        self._going.set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[FaultProxy]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(self.target, timeout=timeout, connector=connector) as self._http:
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if not self._open:
            request.transport.abort()
        self._connections.add(request.transport)
        try:
            return await self._answer(request)
        finally:
            self._connections.discard(request.transport)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._going.wait()
        fault: Fault = "none"
        if request.path in GENERATE and self._random.random() < self.chance:
            fault = self.fault if self.fault != "any" else self._random.choice(FAULTS)
        self.met[fault] += 1
        if fault == "refuse":
            return web.Response(status=500, text="the engine is not in the mood")
        body = await request.read()
        async with self._http.request(
            request.method, request.path_qs, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            await self._forward(request, response, answer, fault)
            return response

    async def _forward(
        self, request: web.Request, response: web.StreamResponse, answer: aiohttp.ClientResponse, fault: Fault
    ) -> None:
        left = self._random.randint(1, 20_000) if fault in ("cut", "half a line", "nonsense") else None
        async for piece in answer.content.iter_any():
            await self._going.wait()
            if fault == "slow":
                await asyncio.sleep(self.delay)
            if left is not None and len(piece) >= left:
                await response.write(piece[:left])
                if fault == "cut" and request.transport is not None:
                    request.transport.abort()
                elif fault == "nonsense":
                    await response.write(b'\n\ndata: {"choices": [{"token_ids": "?"}], "output_ids": null}\n\n')
                return
            if left is not None:
                left -= len(piece)
            await response.write(piece)
