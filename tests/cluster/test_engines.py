"""Engines on nodes of a real cluster that hang, leave and join: nothing is lost, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

import torch
from transformers import AutoModelForCausalLM

from april import EngineError, Group, Prompt, Sample, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.pool import EnginePool
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.cluster import Cluster, EngineSpec
from april.engines.ray.driver import connected
from april.engines.ray.engine_actor import EngineActor
from april.engines.ray.nodes import nodes_now
from april.engines.ray.object_store import ObjectStore
from april.engines.ray.placement import Demand
from april.rollout.engine import Engine
from tests import tiny
from tests.cluster.raylets import Raylets
from tests.limits import HANG


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG):
        while not condition():
            await asyncio.sleep(0.02)


def some_samples(count: int, tokens: int) -> list[Sample]:
    rng = random.Random(0)
    prompts = [Prompt(tuple(rng.randrange(4, 100) for _ in range(6)), str(i)) for i in range(count)]
    return [Group.start(i, prompt, 1, SamplingParams(tokens), seed=0).samples[0] for i, prompt in enumerate(prompts)]


async def finish(engine: Engine, samples: list[Sample]) -> None:
    """Take chunks until all samples have ended; check that the chunks belong to these samples, in order."""
    by_id = {sample.id: sample for sample in samples}
    async with asyncio.timeout(HANG):
        while any(sample.finish is None for sample in samples):
            for chunk in await engine.poll():
                by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
                if chunk.error is not None:  # its engine was lost
                    engine.submit(by_id[chunk.sample_id])


async def test_a_hanging_node_loses_no_token_and_a_joining_node_replaces_it(raylets: Raylets, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tiny.save(tmp_path / "policy")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    settings = {"max_num_seqs": 12, "context_length": 500}
    first, second = some_samples(24, 400), some_samples(24, 60)
    expected = [copy.deepcopy(samples) for samples in (first, second)]
    own = EmbeddedEngine(trained, stop_token_ids=(), **settings)  # type: ignore[arg-type]
    for samples in expected:
        for sample in samples:
            own.submit(sample)
        await finish(own, samples)

    nodes = {node.node_id: node for node in (raylets.add(), raylets.add())}
    engine = EmbeddedSettings(model=str(tmp_path / "policy"), threads=1, **settings)  # type: ignore[arg-type]
    async with connected(raylets.address):
        cluster = Cluster(EngineSpec(engine=engine, demand=Demand(1, 0), replicas=2, placement="exclude_trainer"))
        pool = await cluster.start(lambda what: None)
        watching = asyncio.create_task(cluster.watch(pool))
        try:
            with pytest.raises(ValueError, match="must be in the cluster's object store"):
                await pool.update_weights(1, tmp_path / "policy")
            await pool.update_weights(1, ObjectStore(lambda: iter(trained.named_parameters()), torch.float32).offer(1))
            hung = await _one_hangs(pool, raylets, nodes, first)
            assert [s.response_ids for s in first] == [s.response_ids for s in expected[0]]

            raylets.add()
            await until(lambda: all(member.ready for member in pool.members))
            served = {id for member in pool.members for id in member.samples}
            for sample in second:
                pool.submit(sample)
            served = [len(member.samples) for member in pool.members]
            assert min(served) > 0, "both have work"
            await finish(pool, second)
            assert [s.response_ids for s in second] == [s.response_ids for s in expected[1]]
            assert {v for s in (*first, *second) for v in s.versions} == {1}
        finally:
            watching.cancel()
            await pool.close()
    raylets.signal(hung, signal.SIGCONT)
    await until(lambda: not raylets.engines())  # nor does one remain on a running node


async def _one_hangs(pool: EnginePool, raylets: Raylets, nodes: dict[str, Any], samples: list[Sample]) -> Any:
    """Of two engines, in the midst of samples, with its node, which is returned."""
    for sample in samples:
        pool.submit(sample)
    for chunk in await pool.poll():
        sample = next(sample for sample in samples if sample.id == chunk.sample_id)
        sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    victim = next(member for member in pool.members if member.samples)
    hung = nodes[victim.replica.placement.node.id]  # type: ignore[attr-defined]
    raylets.signal(hung, signal.SIGSTOP)
    await finish(pool, [sample for sample in samples if sample.finish is None])
    await until(lambda: not victim.ready)
    return hung


async def test_a_hanging_engine_is_detected_without_a_request_and_during_its_start(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path / "policy")
    node = raylets.add()
    engine = EmbeddedSettings(model=str(tmp_path / "policy"), threads=1, max_num_seqs=4, context_length=100)
    async with connected(raylets.address):
        (where,) = (each for each in nodes_now() if each.id == node.node_id)
        placement = ActorPlacement(where, (EngineActor, [engine]), Demand(1, 0), "one that nobody asked")
        capacity = await placement.open(1)
        assert (capacity.slots, capacity.context_length) == (4, 100)
        await _stops(raylets, node)
        assert not await placement.alive()
        placement.end()
        await until(lambda: not raylets.engines())  # a process that hangs is not left there

        monkeypatch.setattr("april.engines.ray.actor_placement.STARTING", 0.0)
        placement = ActorPlacement(where, (EngineActor, [Endless(model="")]), Demand(1, 0), "one that starts")
        opening = asyncio.create_task(placement.open(1))
        await _stops(raylets, node)
        with pytest.raises(EngineError, match="hangs while it starts"):
            await asyncio.wait_for(opening, HANG)
        placement.end()
        await until(lambda: not raylets.engines())


class Endless(EmbeddedSettings):
    """An engine that loads its model for ever."""

    def load(self) -> EmbeddedEngine:
        time.sleep(10 * HANG)
        raise AssertionError


async def _stops(raylets: Raylets, node: Any) -> None:
    """The engine of a node, once its process is there."""
    await until(lambda: len(raylets.engines(node)) == 1)
    os.kill(raylets.engines(node)[0], signal.SIGSTOP)


async def test_a_node_that_hangs_before_it_gets_an_engine_is_replaced(raylets: Raylets, tmp_path: Path) -> None:
    """Ray calls a node alive for over a minute after it has hung."""
    tiny.save(tmp_path / "policy")
    raylets.signal(raylets.add(2), signal.SIGSTOP)
    engine = EmbeddedSettings(model=str(tmp_path / "policy"), threads=1, max_num_seqs=4, context_length=100)
    async with connected(raylets.address):
        cluster = Cluster(EngineSpec(engine=engine, demand=Demand(1, 0), replicas=1, placement="exclude_trainer"))
        with pytest.raises(EngineError, match="does not answer within"):
            await cluster.start(lambda what: None)
        raylets.add()
        pool = await cluster.start(lambda what: None)
        await pool.close()


async def test_a_cluster_without_room_is_refused(raylets: Raylets, tmp_path: Path) -> None:
    async with connected(raylets.address):
        wanted = EngineSpec(engine=EmbeddedSettings(model="none"), demand=Demand(2, 0), replicas=1, placement="spread")
        with pytest.raises(EngineError, match="no node has 2 CPUs free: april cluster check RECIPE says more"):
            await Cluster(wanted).start(lambda what: None)
        raylets.add()
        wanted = EngineSpec(
            engine=EmbeddedSettings(model=str(tmp_path)), demand=Demand(1, 0), replicas=1, placement="spread"
        )
        with pytest.raises(EngineError, match=r"(?i)config|model"):
            await Cluster(wanted).start(lambda what: None)
    await until(lambda: not raylets.engines())


async def test_a_process_has_time_to_stop(raylets: Raylets) -> None:
    """Ray's own handler of SIGTERM sets an alarm, and ends the process with it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        async with connected(raylets.address):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(heard))
            assert signal.alarm(0) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_an_address_at_which_nothing_answers_is_named() -> None:
    with pytest.raises(EngineError, match=r"cluster.address = '127.0.0.9:1': no Ray cluster answers there"):
        async with connected("127.0.0.9:1"):
            pass
