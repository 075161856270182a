"""vLLM while it speculates: drafts change no distribution, and every log-probability is the policy's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from april.engines.servers.launch import Server
from april.engines.servers.vllm import connect_vllm
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from tests.limits import HANG
from tests.servers.conftest import CONTEXT, SLOTS, make_samples, start_vllm
from tests.servers.test_engines import EXACT, absorb, advance, error_by_version, finish, reach, submit
from tests.servers.tiny import Oracle, drawn_from, tiny_eagle, tiny_model

pytestmark = pytest.mark.usefixtures("agrees_with_the_server")

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"draft_sample_method": "probabilistic"},
    "eagle3": {},
}
SETTINGS = [
    SamplingParams(120),
    SamplingParams(120, temperature=0.6),
    SamplingParams(120, temperature=0),
    SamplingParams(120, temperature=0.8, top_k=20),
    SamplingParams(120, temperature=0.7, top_p=0.8),
    SamplingParams(120, top_k=40, top_p=0.9),
]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    return [tiny_model(root / str(seed), seed, layers=12) for seed in range(3)]


@pytest.fixture(scope="module")
def passes(policies: list[Path]) -> list[Oracle]:
    """Forward passes of the policies."""
    return [Oracle(path, joint=False) for path in policies]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=METHODS)
async def speculating(
    policies: list[Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Server]:
    drafts = {"method": request.param, "num_speculative_tokens": 4, **METHODS[request.param]}
    if request.param == "draft_model":
        drafts["model"] = str(policies[0])  # it drafts well for the first policy, and badly for the others
    if request.param == "eagle3":
        drafts["model"] = str(tiny_eagle(tmp_path_factory.mktemp("eagle"), policies[0]))
    arguments = ["--speculative-config", json.dumps(drafts)]
    async with start_vllm(policies[0], tmp_path_factory.mktemp("logs"), arguments=arguments) as server:
        yield server


async def accepted(server: Server) -> int:
    """Drafted tokens that were kept, by the server's own count."""
    async with aiohttp.ClientSession(server.url) as http, http.get("/metrics") as response:
        count = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", await response.text(), re.MULTILINE)
    return int(float(count[1])) if count else 0


def scores(sample: Sample, oracle: Oracle) -> Tensor:
    """Log-probabilities of all tokens at each place of the response, shape [length, vocabulary]."""
    with torch.no_grad():
        logits = oracle.model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0]
    return drawn_from(logits[len(sample.prompt_ids) - 1 : -1], sample.sampling, joint=False)


def surprise(samples: Sequence[Sample], oracle: Oracle) -> float:
    """Return the excess of the samples' negative log-probability over its mean under the policy, in standard
    deviations: mean 0 and variance 1 if the tokens were sampled from the policy."""
    excess = variance = 0.0
    for sample in samples:
        every = scores(sample, oracle)
        chances, bits = every.exp(), -every.where(every > -torch.inf, 0)
        mean = (chances * bits).sum(-1)
        excess -= float(mean.sum()) + sum(sample.logprobs)
        variance += float(((chances * bits**2).sum(-1) - mean**2).sum())
    return excess / variance**0.5


async def test_settings_share_a_batch_and_each_is_drawn_from_exactly(
    speculating: Server, policies: list[Path], passes: list[Oracle]
) -> None:
    engine = await connect_vllm(speculating.url)
    await engine.update_weights(0, policies[0])
    groups = (Group.start(i, Prompt((5, 6, 10 + i)), 1, given, 0) for i, given in enumerate(3 * SETTINGS))
    samples = [group.samples[0] for group in groups]
    submit(engine, samples)
    await finish(engine, samples)
    assert max(error_by_version(sample, passes) for sample in samples) < EXACT
    for given in SETTINGS:
        alike = [sample for sample in samples if sample.sampling == given]
        if given.temperature:
            assert abs(surprise(alike, passes[0])) < 6
        else:
            best = [scores(sample, passes[0]).max(-1).values.numpy() - sample.logprobs for sample in alike]
            assert np.max(best) < EXACT
    async with asyncio.timeout(HANG):  # it counts a little later than it sends
        while not await accepted(speculating):
            await asyncio.sleep(0.1)
    await engine.close()


async def test_accepted_tokens_belong_to_the_version_that_verified_them(
    speculating: Server, policies: list[Path], passes: list[Oracle]
) -> None:
    engine = await connect_vllm(speculating.url, stream_interval=8)
    samples = make_samples(SLOTS + 4, SamplingParams(160, temperature=0.6))
    for version in range(3):
        await engine.update_weights(version, policies[version])
        submit(engine, samples)
        if version < 2:
            while sum(int((sample.versions == version).sum()) for sample in samples) < 100:
                await advance(engine, samples)
            absorb(await engine.interrupt(), samples)
    await finish(engine, samples)
    assert all(sample.length == 160 for sample in samples)
    assert {0, 1, 2} == {version for sample in samples for version in sample.versions}
    assert max(error_by_version(sample, passes) for sample in samples) < EXACT
    await engine.close()


async def test_keep_drops_no_token_and_verifies_old_drafts_with_new_weights(
    speculating: Server, policies: list[Path], passes: list[Oracle]
) -> None:
    engine = await connect_vllm(speculating.url, on_update="keep")
    mixed = 0
    for base in range(0, 15, 3):  # on a busy machine the server may be at the end before it is stopped
        await engine.update_weights(base, policies[0])
        samples = make_samples(SLOTS, SamplingParams(240, temperature=0.6))
        for step, weights in ((1, policies[0]), (2, policies[1])):
            submit(engine, samples)
            await reach(engine, samples, 50 * step)
            absorb(await engine.interrupt(), samples)
            await engine.update_weights(base + step, weights)
        submit(engine, samples)
        await finish(engine, samples)
        for sample in samples:
            assert sample.length == 240
            assert sorted(sample.versions) == list(sample.versions)
            # The same weights twice: whatever the KV cache is of, it is the new weights', too.
            old = sample.versions < base + 2
            assert np.abs(passes[0].logprobs(sample) - sample.logprobs)[old].max(initial=0) < EXACT
            if 40 < old.sum() < 200:
                mixed += 1
                # Neither policy alone: new weights over the old policy's keys and values.
                assert np.abs(passes[1].logprobs(sample) - sample.logprobs)[~old].max() > 0.01
                assert np.abs(passes[0].logprobs(sample) - sample.logprobs)[~old].max() > 0.01
        if mixed:
            break
    assert mixed
    await engine.close()


async def test_drafts_end_at_the_context_length(
    speculating: Server, policies: list[Path], passes: list[Oracle]
) -> None:
    engine = await connect_vllm(speculating.url)
    await engine.update_weights(0, policies[0])
    (sample,) = make_samples(1, SamplingParams(CONTEXT - 4, temperature=0.3))
    submit(engine, [sample])
    await finish(engine, [sample])
    assert sample.length == CONTEXT - 4
    assert error_by_version(sample, passes) < EXACT
    await engine.close()
