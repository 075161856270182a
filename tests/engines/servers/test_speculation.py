"""Servers with speculative decoding are refused if their tokens would not follow the policy's distribution."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from april.config.recipe import recipe_from_dict
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import EngineError
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt

EXTENSION = "april.engines.servers.vllm_worker.WorkerExtension"
STANDARD = {"method": "ngram", "rejection_sample_method": "standard"}


@asynccontextmanager
async def answering(answers: dict[str, Any]) -> AsyncIterator[str]:
    """The URL of a server that answers so, and generates nothing."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path])

    async def nothing(request: web.Request) -> web.Response:
        return web.Response(status=400 if "generate" in request.path else 200)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    app.router.add_post("/{path:.*}", nothing)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def vllm(device: str, extension: str, speculation: dict[str, Any] | None) -> dict[str, Any]:
    config = {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "parallel_config": {"worker_extension_cls": extension},
        "device_config": {"device": device},
        "scheduler_config": {"max_num_seqs": 4},
        "cache_config": {},
        "speculative_config": speculation,
    }
    return {
        "/v1/models": {"data": [{"id": "tiny", "root": "/nowhere", "max_model_len": 64}]},
        "/server_info": {"vllm_config": config},
        "/get_world_size": {"world_size": 1},
        "/weight_info": {"weight_version": "default"},
    }


async def test_a_server_is_refused_at_once_whose_log_probabilities_do_not_follow_temperatures_of_requests() -> None:
    answers = vllm("cuda", "", None)
    answers["/server_info"]["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"
    own = {"environment": {"command": ["true"]}, "gateway": {"sampling": "request"}}
    fixed, free = recipe_from_dict({}), recipe_from_dict(own)
    async with answering(answers) as url:
        engine = await connect_vllm(url, vocab_size=50, sampling=fixed.sampling_of_requests())
        await engine.close()
        with pytest.raises(EngineError, match=r"before temperature .* start it with --logprobs-mode"):
            await connect_vllm(url, vocab_size=50, sampling=free.sampling_of_requests())


@pytest.mark.parametrize("speculation", [None, STANDARD], ids=["alone", "drafts"])
@pytest.mark.parametrize(("device", "extension"), [("cuda", ""), ("cpu", EXTENSION)])
async def test_vllm_takes_min_p_only_without_drafts(
    device: str, extension: str, speculation: dict[str, Any] | None
) -> None:
    async with answering(vllm(device, extension, speculation)) as url:
        engine = await connect_vllm(url, vocab_size=50)
        sample = Group.start(3, Prompt((5, 6)), 1, SamplingParams(8, min_p=0.1), 0).samples[0]
        if speculation is None:
            engine.submit(sample)
        else:
            with pytest.raises(ValueError, match=r"sample 3\.0: vLLM at .* takes no min_p while it speculates"):
                engine.submit(sample)
        await engine.close()


@pytest.mark.parametrize(
    ("device", "extension", "speculation", "message"),
    [
        ("cpu", "", STANDARD, "at a temperature that it never sets: start it with --worker-extension-cls april"),
        ("cuda", "", {**STANDARD, "rejection_sample_method": "synthetic"}, "at rates that it was given"),
    ],
)
async def test_vllm_is_refused_when_drafts_change_the_distribution(
    device: str, extension: str, speculation: dict[str, Any], message: str
) -> None:
    async with answering(vllm(device, extension, speculation)) as url:
        with pytest.raises(EngineError, match=message):
            await connect_vllm(url, vocab_size=50)


async def test_sglang_with_speculation_is_refused() -> None:
    server = {"internal_states": [{}], "speculative_algorithm": "NGRAM"}
    async with answering({"/model_info": {"model_path": "/nowhere"}, "/server_info": server}) as url:
        with pytest.raises(EngineError, match=r"speculates \(NGRAM\).*start it without --speculative-algorithm"):
            await connect_sglang(url, vocab_size=50)
