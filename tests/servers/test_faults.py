"""Replicas that fail in every way we know of, between the scheduler and real servers: nothing sampled is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from april.engines.member import Member
from april.engines.pool import EnginePool
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine, EngineError
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.prompt import Prompt
from tests.limits import HANG
from tests.servers.conftest import Connect
from tests.servers.proxy import Fault, FaultProxy
from tests.servers.test_engines import EXACT, error_by_version
from tests.servers.tiny import Oracle

SAMPLING = SamplingParams(150, temperature=1.5, stop_token_ids=(3,))
LONG = SamplingParams(300, temperature=1.5)


def prompts() -> Iterator[Prompt]:
    for i in itertools.count():
        yield Prompt((5, 6, 7, 10 + i % 400), id=str(i))


def scheduler(engine: Engine, sampling: SamplingParams = SAMPLING) -> RolloutScheduler:
    return RolloutScheduler(
        engine,
        prompts(),
        lambda prompt, sample: float(sample.length),
        RolloutParams(rollout_batch_size=4, over_sampling_batch_size=8, n_samples_per_prompt=2),
        sampling=sampling,
        faults=FaultSettings(max_retries=20),
    )


def check(step: RolloutBatch, rollouts: RolloutScheduler, oracles: list[Oracle]) -> None:
    """The step is whole, nothing sampled is lost, and every token is where its policy would have put it."""
    assert len(step.groups) == 4
    rollouts.buffer.check()
    samples = [sample for group in (*step.groups, *rollouts.buffer) for sample in group.samples]
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    for group in step.groups:
        for sample in group.samples:
            stopped = sample.response_ids[-1] in sample.sampling.stop_token_ids
            assert stopped or sample.length == sample.sampling.max_tokens


async def run_steps(
    rollouts: RolloutScheduler, oracles: list[Oracle], models: list[Path], steps: int = 2
) -> list[RolloutBatch]:
    collected = []
    for version in range(steps):
        if version:
            await rollouts.update_weights(models[version])
        collected.append(await rollouts.next_batch())
        check(collected[-1], rollouts, oracles)
    return collected


@pytest.mark.parametrize("fault", ["refuse", "cut", "half a line", "nonsense", "slow"])
async def test_one_of_two_replicas_fails(
    fault: Fault, connect: Connect, proxy: FaultProxy, oracles: list[Oracle], models: list[Path]
) -> None:
    # Both replicas are the same server: one reached directly, one through the proxy.
    pool = EnginePool([await connect(), await connect(proxy.url)], health_interval=0.5)
    proxy.fault, proxy.chance, proxy.delay = fault, 0.5, 0.02
    async with scheduler(pool) as rollouts:
        await run_steps(rollouts, oracles, models)
        assert proxy.met[fault] > 0
    await pool.close()


async def test_the_only_server_fails_in_every_way(
    connect: Connect, proxy: FaultProxy, oracles: list[Oracle], models: list[Path]
) -> None:
    engine = await connect(proxy.url)
    proxy.fault, proxy.chance = "any", 0.4
    async with scheduler(engine) as rollouts:
        steps = await run_steps(rollouts, oracles, models, steps=3)
        assert len(proxy.met) >= 4
        assert any(failure.kind == "engine" for step in steps for failure in step.failures)


@pytest.mark.parametrize("fault", ["hang", "close"])
async def test_a_lost_replica_recovers(
    fault: Literal["hang", "close"], connect: Connect, proxy: FaultProxy, oracles: list[Oracle], models: list[Path]
) -> None:
    """One of two hangs, or has its connections cut and takes no new ones, in mid-step, and is well again later."""
    victim = await connect(proxy.url)
    pool = EnginePool([await connect(), victim], health_interval=0.3, health_timeout=10.0)
    lost = pool.members[1]
    async with scheduler(pool, LONG) as rollouts:
        step = await disturbed(rollouts, lost, getattr(proxy, fault))
        check(step, rollouts, oracles)
        await rollouts.update_weights(models[1])
        assert not lost.ready
        proxy.go_on()
        await until_ready(lost)
        assert victim.version == 1
        check(await rollouts.next_batch(), rollouts, oracles)
    await pool.close()


async def disturbed(rollouts: RolloutScheduler, replica: Member, disturb: Callable[[], None]) -> RolloutBatch:
    """A step in whose middle, when the replica has streamed tokens for a sample it runs, `disturb` is called."""
    while True:
        collecting = asyncio.ensure_future(rollouts.next_batch())
        while not collecting.done():
            running = (sample for sample in rollouts.buffer.samples if sample.id in replica.samples)
            if any(0 < sample.length < LONG.max_tokens // 2 for sample in running):
                disturb()
                return await collecting
            await asyncio.sleep(0)


async def until_ready(replica: Member) -> None:
    async with asyncio.timeout(HANG):
        while not replica.ready:
            await asyncio.sleep(0.1)


async def test_an_update_that_fails_on_one_replica_fails_for_all(
    connect: Connect, oracles: list[Oracle], models: list[Path], tmp_path: Path
) -> None:
    pool = EnginePool([await connect(), await connect()])
    rollouts = scheduler(pool)
    check(await rollouts.next_batch(), rollouts, oracles)
    second = pool.members[1].replica
    refused = await refuse_updates(second)
    with pytest.raises(EngineError, match=r"not all replicas took up weights 1; failed: .*" + second.url):
        await rollouts.update_weights(models[1])
    assert rollouts.engine_version == 0
    refused()
    await rollouts.update_weights(models[1])
    check(await rollouts.next_batch(), rollouts, oracles)
    assert {version for group in rollouts.buffer for s in group.samples for version in s.versions} <= {0, 1}
    await pool.close()


async def refuse_updates(engine):  # type: ignore[no-untyped-def]
    """Send an engine's weight updates to a path that does not exist; the returned function restores the path.

    The second engine shares the server, so the label of its old weights is answered here."""
    post, label = engine._http.post, engine._api.label
    held = await label()

    async def astray(path: str, body: object = None) -> object:
        return await post("/no" + path if "weights" in str((path, body)) else path, body)

    async def as_before() -> str | None:
        return held

    def lead_back() -> None:
        engine._http.post, engine._api.label = post, label

    engine._http.post, engine._api.label = astray, as_before
    return lead_back
