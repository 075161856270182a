"""Engines and nodes of a real Ray cluster on one machine are killed and hung while rollout steps go on.

    .frameworks/cluster/bin/python benchmarks/cluster_kills.py --kills 50      writes cluster_kills.json beside it

Three nodes, each a raylet of its own with room for one engine, two engines. The policy is that of `examples/gcd`; its
weights are handed over anew after each step and stay the same, so whatever happens every response must be the one that
an engine in this process gives. At random moments: SIGKILL or SIGSTOP, of an engine's process or of a whole node. A
hung node is killed, and another joins, or it goes on after a while. Then both engines must be ready again before the
next blow. Seconds until the loss is seen count from the signal.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import logging
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from april import Prompt, RolloutParams, RolloutScheduler, SamplingParams
from april.engines.cluster.cluster import Cluster, Wanted, connected
from april.engines.cluster.placement import Demand
from april.engines.cluster.weights import ObjectStore
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.host import EmbeddedSettings
from april.engines.pool import EnginePool

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.cluster.raylets import Raylets  # noqa: E402

MODEL = str(ROOT / "examples" / "gcd" / "model")
KINDS = ("engine killed", "engine hung", "node killed", "node hung, then killed", "node hung, then goes on")
SETTINGS = EmbeddedSettings(model=MODEL, threads=1, max_running=16, context_length=256, stream_interval=8)
SAMPLING = SamplingParams(160)
STALENESS = 3


class Blows:
    """What is done to the cluster, and what came of it."""

    def __init__(self, raylets: Raylets, pool: EnginePool, rng: random.Random) -> None:
        self.raylets, self.pool, self.rng = raylets, pool, rng
        self.nodes = {node.node_id: node for node in raylets.nodes}
        self.found: list[dict[str, Any]] = []

    async def strike(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 2))
        victim = self.rng.choice(self.pool.members)
        kind = self.rng.choice(KINDS)
        node = self.nodes[victim.replica.site.node]  # type: ignore[attr-defined]
        (engine,) = self.raylets.engines(node)
        began = time.monotonic()
        if kind.startswith("engine"):
            os.kill(engine, signal.SIGKILL if kind == "engine killed" else signal.SIGSTOP)
        elif kind == "node killed":
            await asyncio.to_thread(self.raylets.kill, node)
        else:
            self.raylets.signal(node, signal.SIGSTOP)
        while victim.ready:
            await asyncio.sleep(0.02)
        seen, reason = time.monotonic() - began, victim.reason
        if kind == "node hung, then goes on":
            self.raylets.signal(node, signal.SIGCONT)
        elif kind == "node hung, then killed":
            await asyncio.to_thread(self.raylets.kill, node)
        if kind in ("node killed", "node hung, then killed"):
            del self.nodes[node.node_id]
            new = await asyncio.to_thread(self.raylets.add)
            self.nodes[new.node_id] = new
        while not all(member.ready for member in self.pool.members):
            await asyncio.sleep(0.05)
        back = time.monotonic() - began
        self.found.append({"kind": kind, "seen": round(seen, 3), "back": round(back, 2), "reason": reason})
        print(f"{len(self.found)}: {kind}: seen after {seen:.2f} s, ready after {back:.1f} s: {reason}", flush=True)


async def run(kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    raylets = Raylets(reaped=False)
    for _ in range(3):
        raylets.add()
    try:
        async with connected(raylets.address):
            cluster = Cluster(Wanted(engine=SETTINGS, demand=Demand(1, 0), replicas=2, placement="apart"))
            pool = await cluster.start(print)
            watching = asyncio.create_task(cluster.watch(pool))
            try:
                return await _steps(raylets, pool, kills, rng)
            finally:
                watching.cancel()
    finally:
        raylets.close()


async def _steps(raylets: Raylets, pool: EnginePool, kills: int, rng: random.Random) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    store = ObjectStore(lambda: iter(model.named_parameters()), torch.float32)
    words = random.Random(1)
    prompts = (Prompt(tuple(words.randrange(2, 38) for _ in range(8)), id=str(i)) for i in itertools.count())
    params = RolloutParams(
        rollout_batch_size=8, over_sampling_batch_size=12, n_samples_per_prompt=4, max_staleness=STALENESS
    )
    blows, trained = Blows(raylets, pool, rng), []
    steps = stalest = 0
    began = time.monotonic()
    async with RolloutScheduler(pool, prompts, lambda p, s: float(s.length), params, sampling=SAMPLING) as scheduler:
        await scheduler.load_weights(store.offer(0))
        striking = asyncio.create_task(_strike(blows, kills))
        while not striking.done():
            step = await scheduler.collect()
            steps, stalest = steps + 1, max(stalest, int(step.staleness.max()))
            trained += step.groups
            await scheduler.update_weights(store.offer(steps))
        striking.result()
        scheduler.buffer.check()
        discarded = scheduler.buffer.discarded_tokens
    seconds = time.monotonic() - began
    groups = [group.id for group in trained]
    samples = [sample for group in trained for sample in group.samples]
    chosen = rng.sample(samples, min(1000, len(samples)))
    wrong = await _other_than_undisturbed(model, chosen)
    forward = all((np.diff(sample.versions) >= 0).all() for sample in samples)
    assert len(set(groups)) == len(groups), "a group was trained on twice"
    assert stalest <= STALENESS, "the bound was broken"
    assert forward, "versions went back"
    assert not discarded, "tokens were lost"
    return {
        "kills": len(blows.found),
        "seconds": round(seconds),
        "steps": steps,
        "groups": len(groups),
        "tokens": sum(sample.length for sample in samples),
        "discarded_tokens": discarded,
        "staleness_max": stalest,
        "staleness_bound": STALENESS,
        "responses_compared": len(chosen),
        "responses_unlike_undisturbed": wrong,
        "by_kind": {kind: _summary([b for b in blows.found if b["kind"] == kind]) for kind in KINDS},
        "blows": blows.found,
    }


async def _strike(blows: Blows, kills: int) -> None:
    while len(blows.found) < kills:
        await blows.strike()


async def _other_than_undisturbed(model: Any, samples: list[Any]) -> int:
    """Of these responses, those that an engine that nothing disturbs does not give."""
    engine = EmbeddedEngine(model, max_running=16, context_length=256)
    said: dict[str, list[int]] = {sample.id: [] for sample in samples}
    for sample in samples:
        again = copy.deepcopy(sample)
        again.segments, again.length, again.finish = [], 0, None
        engine.submit(again)
    while chunks := await engine.poll():
        for chunk in chunks:
            said[chunk.sample_id] += chunk.token_ids
    return sum(said[sample.id] != sample.response_ids for sample in samples)


def _summary(blows: list[dict[str, Any]]) -> dict[str, Any]:
    if not blows:
        return {"count": 0}
    each = {name: [blow[name] for blow in blows] for name in ("seen", "back")}
    return {"count": len(blows)} | {
        f"{name}_{what}": round(of(values), 2)
        for name, values in each.items()
        for what, of in (("median", statistics.median), ("max", max))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="   %(message)s")
    found = asyncio.run(run(options.kills, options.seed))
    options.output.write_text(json.dumps({"command": " ".join(sys.argv), **found}, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "blows"}, indent=2))


if __name__ == "__main__":
    main()
