"""Routes that plug-ins hand over, from the servers of a framework, across interrupts and weight updates."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import Chunk, Group, Prompt, Sample, SamplingParams
from april.engines.servers.server_routes import ServerRoutes
from april.integrations.routes import route_metrics, shape_of, whole_routes
from april.integrations.servers import FrameworkServer, UnlabelledSGLang, UnlabelledVLLM
from april.rollout.trajectory.routes import RouteRows, Routes, unknown
from tests import tiny
from tests.engines.servers.test_server_routes import ROUTES, generate, samples
from tests.engines.servers.test_stream_reader import playback, playing
from tests.mixtures import mixture

SHAPE = ServerRoutes((1, 2), 3, 2, 8)
RENAME = {
    "sglang": ("/update_weights_from_disk", {"weight_version": "1"}),
    "vllm": ("/update_weight_version", {"new_version": "1"}),
}
"""Call by which the played server's weights are version 1."""


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 16))
def test_a_row_is_the_samples_own_or_padding(known: list[bool], tokens: int) -> None:
    experts = np.arange(len(known) * 4, dtype=np.uint8).reshape(-1, 2, 2) % 8
    experts[np.flatnonzero(~np.array(known, bool))] = unknown(experts.dtype)
    whole = whole_routes(Routes(experts), tokens, SHAPE, np.int16)
    assert (whole.shape, whole.dtype) == ((tokens - 1, 3, 2), np.int16)
    assert not whole[:, 0].any(), "the first layer is dense"
    for row in range(tokens - 1):
        own = row < len(known) and known[row]
        assert whole[row, 1:].tolist() == (experts[row].tolist() if own else [[0, 1]] * 2)


def test_the_share_of_tokens_without_routes_is_a_metric() -> None:
    group = Group.start(0, Prompt((2, 3)), 1, SamplingParams(9), 0)
    group.samples[0].extend([5, 6, 7], [-1.0] * 3, 0)
    group.samples[0].route(RouteRows(0, np.zeros((3, 2, 2), np.uint8)), 0, False)
    assert route_metrics([group], SHAPE) == {"missing_routes": 0.25}
    assert route_metrics([group], None) == {}


def test_a_model_without_routers_is_refused_by_the_frameworks_setting(tmp_path: Path) -> None:
    mixture("Glm4Moe").save_pretrained(tmp_path / "mixture")
    assert shape_of(str(tmp_path / "mixture"), "--replay") == SHAPE
    tiny.model().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"^--replay: .*dense: Qwen3ForCausalLM has no routers.*; leave the setting"):
        shape_of(str(tmp_path / "dense"), "--replay")


@pytest.mark.parametrize(("kind", "api"), [("sglang", UnlabelledSGLang), ("vllm", UnlabelledVLLM)])
async def test_rows_of_a_frameworks_servers_are_of_the_version_that_drew_the_next_token(kind: str, api: Any) -> None:
    done = samples(3)
    async with playing(kind, rate=800.0) as [url]:
        made = functools.partial(api, routes=ROUTES)
        engine = await FrameworkServer.connect(url, made, vocab_size=playback.VOCABULARY, stream_interval="auto")
        await generate(engine, done, 60)
        cuts = [sample.length for sample in done]
        # The framework has loaded new weights, which the played routes follow.
        await engine._http.post(*RENAME[kind])
        await engine.update_weights(1)
        await generate(engine, done)
        await engine.close()
    for sample, cut in zip(done, cuts, strict=True):
        prompt, tokens = len(sample.prompt_ids), len(sample.prompt_ids) + sample.length
        whole = whole_routes(sample.routes, tokens, ROUTES)
        bounds = [0, prompt + cut - 1, tokens - 1]
        parts = [playback.routes_at(a, b, version) for version, (a, b) in enumerate(itertools.pairwise(bounds))]
        np.testing.assert_array_equal(whole[:, 1:], np.concatenate(parts)[:, 1:])


@pytest.mark.parametrize(("kind", "api"), [("sglang", UnlabelledSGLang), ("vllm", UnlabelledVLLM)])
async def test_routes_that_died_with_a_server_are_of_the_version_that_resumed_the_sample(kind: str, api: Any) -> None:
    """Frameworks know no missing rows: no row is padding, and those of another version are counted."""
    groups = [Group.start(i, Prompt((i, 6 + i, *range(4 + i))), 1, SamplingParams(300), 0) for i in range(2)]
    done = [group.samples[0] for group in groups]
    made = functools.partial(api, routes=ROUTES)
    async with playing(kind, rate=800.0) as [url]:
        engine = await FrameworkServer.connect(url, made, vocab_size=playback.VOCABULARY, stream_interval="auto")
        for sample in done:
            engine.submit(sample)
        while any(sample.length < 40 for sample in done):
            absorb(done, await engine.poll())
        absorb(done, await engine.abandon())  # closes the connections, as the server's death does
        await engine.close()
    cuts = [sample.length for sample in done]
    async with playing(kind, rate=800.0) as [url]:
        engine = await FrameworkServer.connect(url, made, vocab_size=playback.VOCABULARY, stream_interval="auto")
        await engine._http.post(*RENAME[kind])
        await engine.update_weights(1)
        for sample in done:
            engine.submit(sample)
        while any(sample.finish is None for sample in done):
            absorb(done, await engine.poll())
        await engine.close()
    for sample in done:
        whole = whole_routes(sample.routes, len(sample.prompt_ids) + sample.length, ROUTES)
        np.testing.assert_array_equal(whole[:, 1:], playback.routes_at(0, len(whole), 1)[:, 1:])
    # The first version's rows drew all of its tokens, the prompt's last row drew the first one.
    consumed = sum(len(sample.prompt_ids) + sample.length - 1 for sample in done)
    assert route_metrics(groups, ROUTES) == {"missing_routes": sum(cuts) / consumed}


def absorb(done: list[Sample], chunks: list[Chunk]) -> None:
    """Append chunks as the rollouts of plug-ins do."""
    by_id = {sample.id: sample for sample in done}
    for chunk in chunks:
        sample = by_id[chunk.sample_id]
        sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if chunk.routes is not None:
            sample.route(chunk.routes, chunk.version, latest=False, fill=True)
