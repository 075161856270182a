"""Requests of a server that is frozen while its weights change, with a server that plays tokens over real HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from april.engines.servers.client import HTTPClient
from april.engines.servers.freezable_requests import FreezableRequests, ServerState, requests_of
from april.engines.servers.requests import BEHIND_STOPS, ReadingSettings, RequestOrder
from april.engines.servers.stream import Delta, Stream
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from tests.limits import HANG

TOKENS = 60


class PlayedServer:
    """Streams a token every millisecond while it runs; it labels a token with the weights that it holds as it sends."""

    def __init__(self) -> None:
        self.version = 0
        self.going = asyncio.Event()
        self.going.set()
        self.aborted: set[str] = set()
        self.requests: list[str] = []
        self.refuses_resume = False

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body["id"])
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(body["start"], body["end"]):
            await self._wait(body["id"])
            if body["id"] in self.aborted:
                await self._send(response, finish="abort")
                return response
            await asyncio.sleep(0.001)  # a server that freezes at this moment still sends this token
            await self._send(response, index=index, finish="length" if index + 1 == body["end"] else None)
        return response

    async def _wait(self, id: str) -> None:
        while not self.going.is_set() and id not in self.aborted:
            await asyncio.sleep(0.001)

    async def _send(self, response: web.StreamResponse, **event: Any) -> None:
        await response.write(f"data: {json.dumps({**event, 'label': str(self.version)})}\n\n".encode())

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.update((await request.json())["ids"])
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        self.going.clear()
        return web.Response()

    async def resume(self, request: web.Request) -> web.Response:
        if self.refuses_resume:
            return web.Response(status=500, text="no")
        self.going.set()
        return web.Response()


class PlayedAPI:
    """The part of a `ServerAPI` that requests need."""

    generate_path = "/generate"
    routes = None

    def __init__(self, http: HTTPClient) -> None:
        self._http = http

    @property
    def pausing(self) -> PlayedAPI:
        return self

    async def freeze(self) -> None:
        await self._http.post("/pause")

    async def thaw(self) -> None:
        await self._http.post("/resume")

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        start = len(stream.token_ids) - 1
        return {"id": stream.request_id, "start": start, "end": start + stream.budget_left}

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        decoded = json.loads(event)
        finish = {"length": FinishReason.LENGTH, "abort": "abort", None: None}[decoded["finish"]]
        if "index" not in decoded:
            return Delta((), (), finish)  # type: ignore[arg-type]
        return Delta([decoded["index"]], [-1.0], finish, decoded["label"])  # type: ignore[arg-type]

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        await self._http.post("/abort", {"ids": list(request_ids)})
        return True


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[PlayedServer, FreezableRequests]]:
    server = PlayedServer()
    app = web.Application()
    for path in ("generate", "abort", "pause", "resume"):
        app.router.add_post(f"/{path}", getattr(server, path))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = HTTPClient(f"http://127.0.0.1:{runner.addresses[0][1]}", 10.0)
    settings = ReadingSettings("a server", "keep", 60.0, 10.0, 1, 4096)
    requests = requests_of(http, PlayedAPI(http), settings, owns_client=True)  # type: ignore[arg-type]
    assert isinstance(requests, FreezableRequests)
    requests.vocab_size = 1000
    try:
        yield server, requests
    finally:
        await requests.close()
        await runner.cleanup()


def make_samples(count: int) -> list[Sample]:
    return [Group.start(i, Prompt((7,)), 1, SamplingParams(TOKENS), 0).samples[0] for i in range(count)]


def submit(requests: FreezableRequests, samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.finish is None:
            requests.submit(RequestOrder.of(sample, 1000))


def absorb(chunks: Sequence[Chunk], samples: Sequence[Sample]) -> list[str]:
    by_id = {sample.id: sample for sample in samples}
    for chunk in chunks:
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    for sample in samples:
        assert sample.response_ids == list(range(sample.length)), "every token once, in order"
    return [chunk.error for chunk in chunks if chunk.error is not None]


async def poll_until(requests: FreezableRequests, samples: Sequence[Sample], total: int) -> None:
    while len(requests) and sum(sample.length for sample in samples) < total:
        assert not absorb(await requests.poll(), samples)


def update(server: PlayedServer, requests: FreezableRequests, version: int) -> None:
    server.version = version
    requests.set_weights(version, str(version))


async def test_samples_are_resumed_on_their_streams_and_old_tokens_keep_their_version() -> None:
    samples = make_samples(4)
    async with serving() as (server, requests), asyncio.timeout(HANG):
        submit(requests, samples)
        await poll_until(requests, samples, 40)
        absorb(await requests.interrupt(), samples)
        assert await requests.poll() == []
        before = [sample.length for sample in samples]
        update(server, requests, 1)
        submit(requests, samples)
        await poll_until(requests, samples, 4 * TOKENS)
        assert len(server.requests) == 4, "no request was made again"
        for sample, length in zip(samples, before, strict=True):
            assert sample.finish is FinishReason.LENGTH
            assert set(sample.versions[:length]) == {0}
            assert sorted(sample.versions) == list(sample.versions)
            assert set(sample.versions[length + 2 :]) == {1}


async def test_an_unresumed_sample_gets_its_held_tokens_later_unless_it_is_forgotten() -> None:
    samples = make_samples(3)
    async with serving() as (server, requests), asyncio.timeout(HANG):
        submit(requests, samples)
        await poll_until(requests, samples, 30)
        absorb(await requests.interrupt(), samples)
        update(server, requests, 1)
        requests.forget([samples[2].id])
        left = samples[2].length
        submit(requests, samples[:1])
        await poll_until(requests, samples[:1], TOKENS)
        assert len(server.aborted) == 2
        submit(requests, samples)
        await poll_until(requests, samples, 3 * TOKENS)
        assert all(sample.length == TOKENS for sample in samples)
        assert set(samples[2].versions[left:]) == {1}, "tokens of a forgotten sample are never handed out"


@pytest.mark.parametrize("together", [True, False])
async def test_a_sample_that_comes_back_with_other_tokens_gets_none_of_its_old_stream(together: bool) -> None:
    """A sample that ended at a stop string has fewer tokens than its stream, and continues with its next turn."""
    samples = make_samples(2)
    async with serving() as (server, requests), asyncio.timeout(HANG):
        submit(requests, samples)
        await poll_until(requests, samples, 20)
        absorb(await requests.interrupt(), samples)
        cut = Group.start(0, Prompt((7,)), 1, SamplingParams(TOKENS), 0).samples[0]
        ids = samples[0].response_ids[:-1]
        cut.extend(ids, [-1.0] * len(ids), 0)
        update(server, requests, 1)
        if not together:
            submit(requests, samples[1:])
            await poll_until(requests, samples[1:], samples[1].length + 5)
        submit(requests, [cut, *samples[1:]] if together else [cut])
        await poll_until(requests, [cut, samples[1]], 2 * TOKENS)
        assert set(cut.versions[len(ids) :]) == {1}
        assert cut.finish is FinishReason.LENGTH


async def test_a_server_that_cannot_be_resumed_fails_its_samples_and_is_resumed_by_the_next_submission() -> None:
    samples = make_samples(2)
    async with serving() as (server, requests), asyncio.timeout(HANG):
        submit(requests, samples)
        await poll_until(requests, samples, 20)
        absorb(await requests.interrupt(), samples)
        server.refuses_resume = True
        submit(requests, samples)
        errors: list[str] = []
        while len(errors) < 2:
            errors += absorb(await requests.poll(), samples)
        assert all("could not be resumed" in error for error in errors)
        assert requests._server is ServerState.FROZEN
        server.refuses_resume = False
        submit(requests, samples)
        await poll_until(requests, samples, 2 * TOKENS)
        assert all(sample.finish is FinishReason.LENGTH for sample in samples)


async def test_only_stop_strings_lower_the_stream_interval() -> None:
    http = HTTPClient("http://127.0.0.1:1", 10.0)
    settings = ReadingSettings("a server", "recompute", 60.0, 10.0, 200, 4096)
    requests = requests_of(http, PlayedAPI(http), settings, owns_client=True)  # type: ignore[arg-type]
    for number, (stop, tokens) in enumerate([((), 200), (("x",), BEHIND_STOPS)]):
        sample = Group.start(number, Prompt((7,)), 1, SamplingParams(TOKENS, stop=stop), 0).samples[0]
        requests.submit(RequestOrder.of(sample, 1000))
        assert requests._streams[sample.id].interval == tokens
    await requests.close()


@pytest.mark.parametrize("seed", range(8))
async def test_no_token_is_lost_or_duplicated_across_stops_and_forgets(seed: int) -> None:
    rng = random.Random(seed)
    samples = make_samples(6)
    async with serving() as (server, requests), asyncio.timeout(HANG):
        for version in range(1, 100):
            if all(sample.finish for sample in samples):
                break
            unfinished = [sample for sample in samples if sample.finish is None]
            submit(requests, rng.sample(unfinished, rng.randint(1, len(unfinished))))
            await poll_until(requests, samples, sum(sample.length for sample in samples) + rng.randint(0, 60))
            if rng.random() < 0.5:
                absorb(await requests.interrupt([sample.id for sample in rng.sample(samples, 2)]), samples)
            absorb(await requests.interrupt(), samples)
            assert len(requests) == 0
            if rng.random() < 0.3:
                requests.forget([sample.id for sample in rng.sample(samples, 2)])
            if rng.random() < 0.1:
                absorb(await requests.abandon(), samples)
                server.going.set()  # as `ServerEngine.refresh` does
            update(server, requests, version)
        assert all(sample.length == TOKENS for sample in samples)
