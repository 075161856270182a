"""A local HTTP server that plays slime's router for generate functions.

Invariants:
- a request reaches the episode whose path it has, and no other; the paths are secret;
- a request waits as long as the policy takes, over training too; a client that leaves affects its own request only;
- a request that april cannot answer ends its episode with an error: slime's client would repeat the request for a
  minute.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

HOST = "127.0.0.1"
MAX_BODY = 2**30
"""Bytes of a request."""

Handler = Callable[[Any], Awaitable[Any]]
"""Answers the body of a `/generate` request."""


class Session:
    """The requests of one episode.

    Attributes:
        failed: the error of a request that cannot be answered.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


class RouterEndpoint:
    """The server. It listens on the loopback interface from the first session on, until the process ends."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=MAX_BODY)
                app.router.add_route("*", "/{session}/{path:.*}", self._answer)
                # A client that gives up and repeats its request must find its first request gone.
                runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
                await runner.setup()
                site = web.TCPSite(runner, HOST, 0)
                await site.start()
                self._port = runner.addresses[0][1]
                self._runner = runner

    @contextmanager
    def session(self, handler: Handler) -> Iterator[tuple[str, Session]]:
        """Open a session. `start` comes first.

        Yields:
            The text that stands for the router's port in addresses, and the session. slime's functions put host and
            port together as `http://{host}:{port}/generate`.
        """
        secret, session = secrets.token_urlsafe(16), Session(handler)
        self._sessions[secret] = session
        try:
            yield f"{self._port}/{secret}", session
        finally:
            del self._sessions[secret]

    async def _answer(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            return web.json_response({"error": "the episode has ended"}, status=410)
        path = request.match_info["path"]
        if path in ("health", "abort_request"):
            return web.json_response({})
        try:
            if path != "generate" or request.method != "POST":
                raise RuntimeError(
                    f"the generate function sends {request.method} /{path}: april answers POST /generate"
                )
            return web.json_response(await session.handler(await request.json()))
        except Exception as error:
            session.fail(error)
            return web.json_response({"error": str(error)}, status=400)
