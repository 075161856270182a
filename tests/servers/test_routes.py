"""Routes of a real SGLang server, against forward passes of the versions that computed them.

vLLM's CPU build returns none: it refuses `--enable-return-routed-experts` without its model runner V2, which needs
Triton.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest_asyncio

from april import FinishReason, Sample, SamplingParams
from april.engines.servers.launch import Server
from april.engines.servers.server_routes import FLAG, ServerRoutes
from april.engines.servers.sglang import connect_sglang
from april.integrations.routes import whole_routes
from tests import tiny
from tests.engines.architectures import perturb
from tests.engines.test_routes import take
from tests.mixtures import as_sets, mixture, routes
from tests.servers.conftest import make_samples, start_sglang

SHIM = Path(__file__).with_name("sglang_routes")
SHAPE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
UPDATES = 2
AGREEING = 0.998
"""Share of (token, layer) pairs with the same experts: in float32, rounding decides between two experts at a time."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policies(tmp_path_factory: Any) -> list[tuple[Any, Path]]:
    """A mixture of experts and two updates of it, with their directories."""
    root, policy = tmp_path_factory.mktemp("mixtures"), mixture(num_hidden_layers=8, tie_word_embeddings=False, **SHAPE)
    made = []
    for version in range(UPDATES + 1):
        if version:
            policy = copy.deepcopy(policy)
            perturb(policy, version)
        policy.save_pretrained(root / str(version))
        tiny.tokenizer().save_pretrained(root / str(version))
        made.append((policy, root / str(version)))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mixture_server(policies: list[tuple[Any, Path]], tmp_path_factory: Any) -> AsyncIterator[Server]:
    logs = tmp_path_factory.mktemp("logs")
    async with start_sglang(policies[0][1], logs, arguments=[FLAG], variables={"PYTHONPATH": str(SHIM)}) as server:
        yield server


async def _advance(engine: Any, samples: list[Sample], tokens: int) -> None:
    for sample in samples:
        if sample.finish is None:
            engine.submit(sample)
    while any(sample.finish is None and sample.length < tokens for sample in samples):
        take(samples, await engine.poll())


def _agreement(sample: Sample, policies: list[tuple[Any, Path]]) -> float:
    """Share of known (token, layer) pairs with the experts of the version that drew the next token."""
    assert sample.routes is not None
    found, known, start = as_sets(sample.routes.experts), sample.routes.known, len(sample.prompt_ids)
    ids = [*sample.prompt_ids, *sample.response_ids]
    by_version = [as_sets(routes(policy, ids)) for policy, _ in policies]
    own = np.concatenate([np.full(start - 1, sample.versions[0]), sample.versions])
    expected = np.stack([by_version[version][place] for place, version in enumerate(own)])
    return float((found == expected[: len(found)]).all(-1)[known].mean())


async def test_rows_of_sglang_are_of_the_version_that_drew_the_next_token(
    mixture_server: Server, policies: list[tuple[Any, Path]]
) -> None:
    shape = ServerRoutes.of(str(policies[0][1]), latest=False)
    engine = await connect_sglang(mixture_server.url, routes=shape)
    await engine.update_weights(0, policies[0][1])
    samples = make_samples(4, SamplingParams(90))
    for version in range(1, UPDATES + 1):
        await _advance(engine, samples, 30 * version)
        take(samples, await engine.interrupt())
        # Aborted requests return routes, and the last token has none yet.
        assert all(sample.missing_routes == 0 for sample in samples)
        await engine.update_weights(version, policies[version][1])
    await _advance(engine, samples, 90)
    await engine.close()
    for sample in samples:
        assert sample.finish is FinishReason.LENGTH
        assert set(sample.versions) == {0, 1, 2}
        assert sample.missing_routes == 0
        assert _agreement(sample, policies) >= AGREEING
        whole = whole_routes(sample.routes, len(sample.prompt_ids) + sample.length, shape)
        assert sample.routes is not None
        np.testing.assert_array_equal(whole, sample.routes.experts)
    newest = policies[-1][0]
    now = [as_sets(routes(newest, [*s.prompt_ids, *s.response_ids])[:-1]) for s in samples]
    differing = [(as_sets(s.routes.experts) != own).any(-1).mean() for s, own in zip(samples, now, strict=True)]  # type: ignore[union-attr]
    assert min(differing) > 10 * (1 - AGREEING), "the newest version alone would have routed otherwise"


async def test_routes_of_tokens_whose_connection_broke_come_with_the_next_request(
    mixture_server: Server, policies: list[tuple[Any, Path]]
) -> None:
    """The same version computes them again; another version's rows are not taken."""
    engine = await connect_sglang(mixture_server.url, routes=ServerRoutes.of(str(policies[0][1]), latest=False))
    await engine.update_weights(0, policies[0][1])
    samples = make_samples(2, SamplingParams(60))
    await _advance(engine, samples, 20)
    take(samples, await engine.abandon())
    await engine.close()
    assert all(sample.routes is None for sample in samples)
    engine = await connect_sglang(mixture_server.url, routes=ServerRoutes.of(str(policies[0][1]), latest=False))
    await engine.update_weights(0, policies[0][1])
    await _advance(engine, samples, 40)
    take(samples, await engine.interrupt())
    assert all(sample.missing_routes == 0 for sample in samples)
    await _advance(engine, samples, 50)
    cuts = [len(sample.prompt_ids) + sample.length - 1 for sample in samples]
    known = [0 if sample.routes is None else sample.routes.length for sample in samples]
    take(samples, await engine.abandon())
    await engine.close()
    engine = await connect_sglang(mixture_server.url, routes=ServerRoutes.of(str(policies[0][1]), latest=False))
    await engine.update_weights(1, policies[1][1])
    await _advance(engine, samples, 60)
    await engine.close()
    for sample, cut, length in zip(samples, cuts, known, strict=True):
        assert sample.missing_routes == cut - length > 0
        assert _agreement(sample, policies[:2]) >= AGREEING
