"""Outages of a server, over real HTTP: no sample is rejected, and all samples resume from their last token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from april import EngineError, Prompt, RolloutScheduler, Sample, SamplingParams
from april.engines.pool import EnginePool
from april.engines.servers.client import HTTPClient, RequestError, fault_of
from april.engines.servers.launch import free_port
from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import Engine, Fault
from tests.engines.servers.test_stream_reader import check, playback, playing
from tests.limits import HANG, NEVER
from tests.scheduling import scheduler_of
from tests.servers.proxy import GENERATE, FaultProxy


class Gateway(FaultProxy):
    """Answers `status` to everything, or to requests for one prompt only."""

    status = 0
    only_prompt: int | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        concerned = self.status != 0
        if self.only_prompt is not None:
            body = await request.json() if request.path in GENERATE else {}
            concerned = concerned and body.get("token_ids", [None])[0] == self.only_prompt
        return (
            web.Response(status=self.status, text="says the gateway") if concerned else await super()._handle(request)
        )


@asynccontextmanager
async def gateway(rate: float = 400.0, **settings: Any) -> AsyncIterator[tuple[Gateway, Engine]]:
    async with playing("vllm", rate=rate) as (url,), Gateway(url).run() as proxy:
        settings = {"stall_timeout": NEVER, **settings}
        engine = await connect_vllm(proxy.url, vocab_size=playback.VOCABULARY, **settings)
        try:
            yield proxy, engine  # type: ignore[misc]
        finally:
            await engine.close()


def scheduler(engine: Engine, **own: Any) -> RolloutScheduler:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    prompts = (Prompt((i, 4, 2, 3), str(i)) for i in range(100))
    settings = {"rollout_batch_size": 3, "over_sampling_batch_size": 4, "n_samples_per_prompt": 2, "retry_delay": 0.1}
    settings["outage_limit"] = NEVER
    return scheduler_of(engine, prompts, score, sampling=SamplingParams(150), **{**settings, **own})


async def disturbed(rollouts: RolloutScheduler, begin: Any, end: Any, seconds: float = 1.2) -> None:
    """A step in whose middle `begin` is called, and `end` some time later: it is as if nothing had happened."""
    async with rollouts:
        collecting = asyncio.create_task(rollouts.next_batch())
        while rollouts.step_tokens < 100:
            await asyncio.sleep(0.01)
        begin()
        await asyncio.sleep(seconds)
        before = rollouts.step_tokens
        end()
        step = await asyncio.wait_for(collecting, HANG)
    assert step.sampled_tokens > before
    assert not step.rejections
    assert {group.id for group in step.groups} <= {0, 1, 2, 3}
    check([sample for group in (*step.groups, *rollouts.buffer) for sample in group.samples])


@pytest.mark.parametrize("trouble", ["connections cut", "silence", 500])
async def test_a_step_survives_an_outage_of_the_only_server(trouble: str | int) -> None:
    async with gateway(stall_timeout=0.5) as (proxy, engine):

        def begin() -> None:
            if trouble == "silence":
                proxy.hang()
                return
            if isinstance(trouble, int):
                proxy.status = trouble
            for connection in proxy._connections:
                connection.abort()
            proxy._open = isinstance(trouble, int)

        def end() -> None:
            proxy.status = 0
            proxy.go_on()

        await disturbed(scheduler(engine, max_retries=0), begin, end)


async def test_a_step_survives_an_outage_of_all_servers_of_a_pool() -> None:
    async with gateway() as (proxy, engine):
        pool = EnginePool([engine], health_interval=0.1, patience=NEVER)

        def begin() -> None:
            proxy.status = 503
            proxy.close()
            proxy.go_on()

        await disturbed(scheduler(pool, max_retries=0), begin, lambda: setattr(proxy, "status", 0))
        await pool.close()


@pytest.mark.parametrize(("status", "outage_limit"), [(400, NEVER), (429, 2.0)])
async def test_a_single_failing_request_is_a_fault_of_its_sample(status: int, outage_limit: float) -> None:
    """A request that never reaches the model, too, once this has lasted as long as an outage may."""
    async with gateway() as (proxy, engine):
        proxy.status, proxy.only_prompt = status, 1
        rollouts = scheduler(engine, rollout_batch_size=4, max_retries=1, outage_limit=outage_limit)
        async with rollouts:
            step = await asyncio.wait_for(rollouts.next_batch(), HANG)
        assert [one.group_id for one in step.quarantined] == [1]
        assert f"HTTP {status}: says the gateway" in step.quarantined[0].error


@pytest.mark.parametrize(("status", "remedy"), [(401, "set APRIL_ENGINE_API_KEY"), (404, "docs/engines.md")])
async def test_a_server_that_refuses_everything_stops_the_step_soon_with_the_remedy(
    status: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("april.rollout.generation.engine_health.REFUSED_SECONDS", 0.5)
    async with gateway() as (proxy, engine):
        proxy.status = status
        rollouts = scheduler(engine)
        async with rollouts:
            with pytest.raises(EngineError, match=rf"refused all requests for .*HTTP {status}.*{remedy}"):
                await asyncio.wait_for(rollouts.next_batch(), HANG)
            assert len(rollouts.buffer) == 4, "nothing is rejected"
            proxy.status = 0
            assert len((await asyncio.wait_for(rollouts.next_batch(), HANG)).groups) == 3


async def test_failures_are_classified() -> None:
    async def failure(url: str) -> Fault:
        client = HTTPClient(url, patience=5.0)
        try:
            with pytest.raises((RequestError, aiohttp.ClientError)) as caught:
                await client.get("/health")
        finally:
            await client.close()
        return fault_of(caught.value)

    assert await failure(f"http://127.0.0.1:{free_port()}") is Fault.UNAVAILABLE, "refused"
    assert await failure("http://no-such-host.invalid:80") is Fault.UNAVAILABLE, "a name that does not resolve"
    async with Gateway("http://127.0.0.1:1").run() as proxy:
        for status in (429, 502, 503, 504, 400, 401, 403, 404, 422, 500):
            proxy.status = status
            expected = Fault.UNAVAILABLE if status in (429, 502, 503, 504) else Fault.REFUSED
            assert await failure(proxy.url) is (Fault.UNKNOWN if status == 500 else expected)
        proxy.status = 0
        proxy.close()
        assert await failure(proxy.url) is Fault.UNKNOWN, "reset"


async def test_a_server_that_does_not_answer_is_named_and_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        with caplog.at_level(logging.WARNING, "april"), pytest.raises(EngineError, match=r"no answer in 0\.2 s"):
            await asyncio.wait_for(connect_vllm(url, patience=0.2), HANG)
    finally:
        server.close()
    assert caplog.messages == [f"waiting for {url}/v1/models: no answer for 0.1 s, waiting for at most 0.2 s"]


async def test_an_unanswered_update_ends_at_its_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(update_timeout=0.6) as (proxy, engine):
        engine._http._patience = 0.2  # type: ignore[attr-defined]
        proxy.hang()
        began = asyncio.get_running_loop().time()

        async def load(version: int, weights: Any, receiver: Any) -> None:
            await engine._http.post("/load")  # type: ignore[attr-defined]

        engine._api.load = load  # type: ignore[attr-defined]
        with caplog.at_level(logging.WARNING, "april"), pytest.raises(EngineError, match="did not take up weights 1"):
            await engine.update_weights(1)
        assert asyncio.get_running_loop().time() - began > 0.5, "not at the limit of other calls"
        assert "/load: no answer for 0.3 s" in caplog.messages[0]
        proxy.go_on()
