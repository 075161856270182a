"""Requests with images: few of their bodies are in memory at a time, and one that was not sent is not aborted."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from april.engines.servers import requests as module
from april.engines.servers.client import HTTPClient
from april.engines.servers.requests import ReadingSettings, RequestOrder, Requests
from april.engines.servers.stream import Stream
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.features import Feature
from tests.engines.servers.test_freezable_requests import PlayedAPI, PlayedServer
from tests.limits import HANG

PIXELS = "0" * 1_000_000
IMAGE = (Feature("1.png", "5c0e", 0, 1),)


class ImageAPI(PlayedAPI):
    """Makes images when it may."""

    def __init__(self, http: HTTPClient) -> None:
        super().__init__(http)
        self.may_make = threading.Event()
        self.asked = 0

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        self.asked += 1
        assert self.may_make.wait(HANG)
        return {"pixels": PIXELS}


class RecordingClient(HTTPClient):
    bodies: list[Any]

    def request(self, method: str, path: str, body: Any = None) -> Any:
        if isinstance(body, bytes):
            self.bodies.append(body)
        return super().request(method, path, body)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[PlayedServer, ImageAPI, RecordingClient, Requests]]:
    server = PlayedServer()
    app = web.Application(client_max_size=0)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort", server.abort)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = RecordingClient(f"http://127.0.0.1:{runner.addresses[0][1]}", 10.0)
    http.bodies = []
    api = ImageAPI(http)
    requests = Requests(
        http,
        api,
        ReadingSettings("a server", "recompute", 60.0, 10.0, 1, 4096),
        owns_client=True,  # type: ignore[arg-type]
    )
    requests.vocab_size = 1000
    try:
        yield server, api, http, requests
    finally:
        api.may_make.set()
        server.going.set()
        await requests.close()
        await runner.cleanup()


def submit(requests: Requests, count: int) -> None:
    for number in range(count):
        requests.submit(RequestOrder(f"{number}.0", [7], SamplingParams(60), 0, 60, None, 0, IMAGE))


async def test_a_body_with_images_is_dropped_while_its_response_is_read() -> None:
    async with serving() as (server, api, http, requests), asyncio.timeout(HANG):
        api.may_make.set()
        submit(requests, 1)
        assert (await requests.poll())[0].token_ids
        server.going.clear()
        [body] = http.bodies
        http.bodies.clear()
        assert len(body) > len(PIXELS)
        assert sys.getrefcount(body) == 2, "this frame and the call alone refer to it"


async def test_few_bodies_with_images_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMAGE_REQUESTS", 2)
    async with serving() as (_, api, http, requests), asyncio.timeout(HANG):
        submit(requests, 12)
        while api.asked < 2:
            await asyncio.sleep(0.001)
        for _ in range(20):  # further threads would have started by then
            await asyncio.sleep(0)
        assert api.asked == 2
        api.may_make.set()
        finished = 0
        while finished < 12:
            finished += sum(chunk.finish is not None for chunk in await requests.poll())
        assert len(http.bodies) == 12


async def test_an_interrupt_sends_no_request_whose_images_are_being_made() -> None:
    async with serving() as (server, api, http, requests), asyncio.timeout(HANG):
        submit(requests, 3)
        while not api.asked:
            await asyncio.sleep(0.001)
        assert await requests.interrupt() == []
        api.may_make.set()
        assert not len(requests)
        assert not server.requests
        assert not server.aborted
        assert not http.bodies
