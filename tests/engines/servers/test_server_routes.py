"""Routes of servers that play tokens and routes back over real HTTP, in the formats of vLLM and SGLang."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from april import EngineError, FinishReason, Group, Prompt, Sample, SamplingParams
from april.engines.servers.client import RequestError
from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.stream import Stream
from april.engines.servers.stream_reader import StreamReader
from tests.engines.servers.test_stream_reader import CONNECT, playback, playing
from tests.engines.test_routes import take
from tests.mixtures import mixture

ROUTES = ServerRoutes((1, 2, 3), playback.LAYERS, playback.TOP_K, playback.EXPERTS)
KINDS = ("vllm", "sglang")


def samples(count: int = 4, tokens: int = 300) -> list[Sample]:
    """Prompts as the servers expect them: any number, and their length."""
    made = [Group.start(i, Prompt((i, 6 + i, *range(4 + i))), 1, SamplingParams(tokens), 0) for i in range(count)]
    return [group.samples[0] for group in made]


async def connect(kind: str, url: str, **settings: Any) -> Any:
    return await CONNECT[kind](url, vocab_size=playback.VOCABULARY, routes=ROUTES, **settings)


async def generate(engine: Any, done: Sequence[Sample], tokens: int | None = None) -> None:
    """Generate to the ends, or until each sample has `tokens` tokens; then interrupt."""
    for sample in done:
        if sample.finish is None:
            engine.submit(sample)
    while any(sample.finish is None and (tokens is None or sample.length < tokens) for sample in done):
        take(done, await engine.poll())
    take(done, await engine.interrupt())


def expected(start: int, end: int, version: int) -> Any:
    return playback.routes_at(start, end, version)[:, 1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", [False, True])
async def test_interrupted_requests_return_the_routes_of_each_version(kind: str, reader: bool, tmp_path: Path) -> None:
    done, process = samples(), StreamReader()
    (tmp_path / "model.safetensors").touch()
    async with playing(kind, rate=800.0) as [url]:
        engine = await connect(kind, url)
        if reader:
            await engine.use_reader(process)
        cuts = []
        for version in (1, 2):
            await generate(engine, done, 60 * version)
            cuts.append([sample.length for sample in done])
            # The last token is not consumed yet, and its row comes with the resumed request.
            assert all(sample.missing_routes == 0 for sample in done)
            await engine.update_weights(version, tmp_path)
        await generate(engine, done)
        await engine.close()
        await process.close()
    for i, sample in enumerate(done):
        prompt = len(sample.prompt_ids)
        bounds = [0, prompt + cuts[0][i] - 1, prompt + cuts[1][i] - 1, prompt + sample.length - 1]
        parts = [expected(a, b, version) for version, (a, b) in enumerate(itertools.pairwise(bounds))]
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes.experts, np.concatenate(parts))


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_of_a_server_that_dies_have_no_routes(kind: str) -> None:
    done = samples(2)
    async with playing(kind, rate=800.0) as [url]:
        engine = await connect(kind, url)
        for sample in done:
            engine.submit(sample)
        while any(sample.length < 40 for sample in done):
            take(done, await engine.poll())
        take(done, await engine.abandon())  # closes the connections, as the server's death does
        lost = [len(sample.prompt_ids) + sample.length - 1 for sample in done]
        assert all(sample.routes is None for sample in done)
        await engine.close()
    async with playing(kind, rate=800.0) as [url]:
        engine = await connect(kind, url)
        engine.version = 1
        engine._name_weights()
        await generate(engine, done)
        await engine.close()
    for sample, count in zip(done, lost, strict=True):
        # The prompt's rows are known from the new request; those that drew lost tokens are not.
        assert sample.missing_routes == count - len(sample.prompt_ids) + 1
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes.experts[count:], expected(count, sample.routes.length, 0))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_the_flag_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing(kind) as [url]:
        engine = await connect(kind, url)
        get = engine._http.get

        async def without(path: str) -> Any:
            answer = await get(path)
            for part in (answer, answer.get("vllm_config", {})):
                part.pop("enable_return_routed_experts", part.pop("aux_output_config", None))
            return answer

        monkeypatch.setattr(engine._http, "get", without)
        with pytest.raises(EngineError, match="returns no routes: start it with --enable-return-routed-experts"):
            await engine.refresh()
        await engine.close()


def stream() -> Stream:
    return Stream("0.0", "r", [1, 2, 3], SamplingParams(9), 0, 9, 0, 100)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 3, 2), np.uint8), r"shape \[2, 3, 2\] .* policy has 4 layers with 2 experts"),
        (np.zeros((2, 4, 3), np.uint8), r"shape \[2, 4, 3\] .* another model"),
        (np.full((2, 4, 2), 100, np.uint8), "expert 100 came where the policy has 100 experts"),
        (np.zeros((2, 4, 2), np.float32), "another model"),
    ],
)
def test_routes_of_another_model_are_refused(rows: Any, message: str) -> None:
    file = io.BytesIO()
    np.save(file, rows)
    with pytest.raises(RequestError, match=message):
        ROUTES.of_vllm(base64.b64encode(file.getvalue()).decode(), stream(), None)


def test_routes_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        ROUTES.of_vllm(base64.b64encode(b"no file").decode(), stream(), None)
    with pytest.raises(RequestError, match="not of 4 layers with 2 experts"):
        ROUTES.of_sglang(base64.b64encode(bytes(4 * 9)).decode(), stream(), None)


@pytest.mark.parametrize("read", [ROUTES.of_vllm, ROUTES.of_sglang])
def test_a_response_does_not_end_without_its_routes(read: Any) -> None:
    """An aborted request is continued, and the next request supplies them."""
    assert read(None, stream(), None) is read(None, stream(), "abort") is None
    with pytest.raises(RequestError, match="a response ended without its routes: start the server with --enable-ret"):
        read(None, stream(), FinishReason.STOP)


def test_the_shape_is_read_from_the_model(tmp_path: Path) -> None:
    mixture("Glm4Moe").save_pretrained(tmp_path)
    assert ServerRoutes.of(str(tmp_path), True) == ServerRoutes((1, 2), 3, 2, 8, True)
