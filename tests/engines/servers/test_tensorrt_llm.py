"""The TensorRT-LLM adapter against a server of ours that speaks trtllm-serve's protocol, with a table for a model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from april.engines.servers.server import ServerEngine
from april.engines.servers.tensorrt_llm import connect_tensorrt_llm
from april.rollout.engine import EngineError
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

VOCABULARY = 50


def next_token(ids: list[int]) -> tuple[int, float]:
    """The model: the next token and its log-probability follow from what stands before it."""
    rng = random.Random(repr(ids))
    return rng.randrange(VOCABULARY), -rng.random()


class RecordedServer:
    """Answers as trtllm-serve does: token ids and log-probabilities in chunks, a cancelled request ends with its
    connection, unknown fields are refused."""

    fields = frozenset(
        """model prompt stream max_tokens temperature top_k seed stop_token_ids include_stop_str_in_output ignore_eos
        detokenize add_special_tokens logprobs""".split()  # noqa: SIM905 (a list of names reads better as words)
    )

    def __init__(self) -> None:
        self.cancelled = 0
        self.logprobs = True
        self.seeds: list[int] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if unknown := set(body) - self.fields:
            return web.json_response({"object": "error", "message": f"unknown fields {unknown}"}, status=400)
        self.seeds.append(body["seed"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids, rng = list(body["prompt"]), random.Random(body["seed"])
        left, reason = body["max_tokens"], None
        try:
            while reason is None:
                chunk, logprobs = [], []
                for _ in range(rng.randint(1, 3)):
                    token, logprob = next_token(ids)
                    ids.append(token)
                    chunk.append(token)
                    logprobs.append(logprob)
                    left -= 1
                    if token in body["stop_token_ids"]:
                        reason = "stop"
                    elif not left:
                        reason = "length"
                    if reason:
                        break
                await response.write(self.event(body["model"], chunk, logprobs, reason))
                await asyncio.sleep(0.001)
        except (ConnectionError, asyncio.CancelledError):
            self.cancelled += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    def event(self, model: str, ids: list[int], logprobs: list[float], reason: str | None) -> bytes:
        scored = {"text_offset": [], "token_logprobs": logprobs, "tokens": [], "top_logprobs": []}
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "stop_reason": None}
        choice |= {"logprobs": scored if self.logprobs else None, "finish_reason": reason}
        event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model, "choices": [choice]}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def serving(recorded: RecordedServer) -> AsyncIterator[str]:
    """The URL under which `recorded` answers."""
    app = web.Application()
    app.router.add_post("/v1/completions", recorded.complete)
    app.router.add_get("/v1/models", recorded.models)
    app.router.add_get("/health", recorded.health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[RecordedServer, str]]:
    recorded = RecordedServer()
    async with serving(recorded) as url:
        yield recorded, url


async def connect(url: str, **settings: Any) -> ServerEngine:
    return await connect_tensorrt_llm(url, slots=4, context_length=200, vocab_size=VOCABULARY, **settings)


def make_samples(n: int, sampling: SamplingParams) -> list[Sample]:
    return [Group.start(i, Prompt((1, 2, 3 + i)), 1, sampling, 0).samples[0] for i in range(n)]


def check(sample: Sample) -> None:
    """Every token is the model's, whatever request it came from."""
    ids = list(sample.prompt_ids)
    for token, logprob in zip(sample.response_ids, sample.logprobs, strict=True):
        expected, value = next_token(ids)
        assert token == expected
        assert logprob == pytest.approx(value)
        ids.append(token)


async def run(engine: ServerEngine, samples: list[Sample], until: int | None = None) -> None:
    by_id = {sample.id: sample for sample in samples}
    while any(s.finish is None for s in samples) and (until is None or max(s.length for s in samples) < until):
        for chunk in await engine.poll():
            assert chunk.error is None
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)


async def test_interrupted_by_disconnect_and_resumed(server: tuple[RecordedServer, str]) -> None:
    recorded, url = server
    loaded = []

    async def load(version: int, weights: Any) -> None:
        loaded.append((version, weights))

    engine = await connect(url, load=load)
    samples = make_samples(6, SamplingParams(100, stop_token_ids=(7,)))
    for round in range(3):
        for sample in samples:
            if sample.finish is None:
                engine.submit(sample)
        await run(engine, samples, until=8 * (round + 1))
        for chunk in await engine.interrupt():
            sample = samples[int(chunk.sample_id.removesuffix(".0"))]
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        assert await engine.poll() == []
        await engine.update_weights(round + 1, "somewhere")
        await engine.check()
    for sample in samples:
        if sample.finish is None:
            engine.submit(sample)
    await run(engine, samples)
    for sample in samples:
        check(sample)
        assert (sample.finish is FinishReason.STOP) == (sample.response_ids[-1] == 7)
    assert recorded.cancelled > 0
    assert len(set(recorded.seeds)) == len(recorded.seeds) > len(samples)
    assert loaded == [(1, "somewhere"), (2, "somewhere"), (3, "somewhere")]
    await engine.close()


async def test_unsupported_features_are_refused(server: tuple[RecordedServer, str]) -> None:
    recorded, url = server
    with pytest.raises(ValueError, match="cannot freeze requests"):
        await connect(url, on_update="keep")
    engine = await connect(url)
    with pytest.raises(ValueError, match=r"sample 0\.0: .* reports log-probabilities before temperature"):
        engine.submit(make_samples(1, SamplingParams(4, temperature=0.5))[0])
    with pytest.raises(EngineError, match="takes no weights by path"):
        await engine.update_weights(1, "somewhere")
    recorded.logprobs = False
    (sample,) = make_samples(1, SamplingParams(4))
    engine.submit(sample)
    (chunk,) = await engine.poll()
    assert chunk.error is not None
    assert "does not stream them" in chunk.error
    await engine.close()
