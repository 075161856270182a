"""Engines, nodes and drivers of a real Ray cluster on one machine are killed and stopped during rollout steps.

    .frameworks/cluster/bin/python benchmarks/cluster_kills.py      writes cluster_kills.json

Engines and nodes: three nodes, each a separate raylet with room for one engine, two engines. The policy is the one of
`examples/gcd`; its weights are sent again after each step and stay the same, so every response must equal the response
of an engine in this process. At random moments: SIGKILL or SIGSTOP, of an engine's process or of a whole node. A
stopped node is killed, and another joins, or it resumes after a while. Then both engines must be ready again before the
next fault. Seconds until the loss is detected count from the signal.

Joins: the same steps on two nodes with an engine each; a node joins, gets an engine, and is killed once that engine has
samples. Seconds and steps count from the time at which Ray reports the node as alive: until a place on it is reserved
for an engine, the engine's process answers, it has loaded its model and the current weights, and it has its first
samples.

Drivers: `april train` of the same task on the same nodes, training. At random moments: SIGKILL, then `april resume`; or
SIGSTOP for longer than the heartbeat's time limit. The next fault follows once steps continue. The run's files are
checked at the end: each step and each group once, and the bound.
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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import torch
from record import machine, spread
from transformers import AutoModelForCausalLM

from april import Prompt, RolloutParams, RolloutScheduler, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.pool import EnginePool
from april.engines.ray.actor_channel import PINGS
from april.engines.ray.cluster import Cluster, EngineSpec
from april.engines.ray.driver import connected
from april.engines.ray.nodes import alive_nodes
from april.engines.ray.object_store import ObjectStore
from april.engines.ray.placement import Demand

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.cluster.raylets import Raylets  # noqa: E402

MODEL = str(ROOT / "examples" / "gcd" / "model")
KINDS = ("engine killed", "engine hung", "node killed", "node hung, then killed", "node hung, then goes on")
SETTINGS = EmbeddedSettings(model=MODEL, threads=1, max_num_seqs=16, context_length=256, stream_interval=8)
SAMPLING = SamplingParams(160)
STALENESS = 3


class Blows:
    """Faults of the cluster and their outcomes."""

    def __init__(self, raylets: Raylets, pool: EnginePool, rng: random.Random) -> None:
        self.raylets, self.pool, self.rng = raylets, pool, rng
        self.nodes = {node.node_id: node for node in raylets.nodes}
        self.found: list[dict[str, Any]] = []
        self.began: list[float] = []

    def summary(self) -> dict[str, Any]:
        return {"by_kind": {kind: _summary([b for b in self.found if b["kind"] == kind]) for kind in KINDS}}

    async def strike(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 2))
        victim = self.rng.choice(self.pool.members)
        kind = self.rng.choice(KINDS)
        node = self.nodes[victim.replica.placement.node.id]  # type: ignore[attr-defined]
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


class Joins:
    """Nodes that join, and what became of them."""

    def __init__(self, raylets: Raylets, pool: EnginePool, rng: random.Random) -> None:
        self.raylets, self.pool, self.rng = raylets, pool, rng
        self.found: list[dict[str, Any]] = []
        self.began: list[float] = []
        """When each step began, the present one the last."""

    def summary(self) -> dict[str, Any]:
        each = {name: spread([join[name] for join in self.found]) for name in self.found[0]}
        return {"step_seconds": spread([end - begin for begin, end in itertools.pairwise(self.began)])} | each

    async def strike(self) -> None:
        while not self.began:
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.rng.uniform(0, 2))
        known = {node.id for node in await alive_nodes()}
        adding = asyncio.create_task(asyncio.to_thread(self.raylets.add))
        while not (joined := {node.id for node in await alive_nodes()} - known):
            await asyncio.sleep(0.02)
        moments, steps = [time.monotonic()], len(self.began)
        member = await self._placed(*joined)
        moments.append(time.monotonic())
        await member.replica.placement.actor.ping.options(concurrency_group=PINGS).remote()  # type: ignore[attr-defined]
        moments.append(time.monotonic())
        given = member.given
        while not member.ready:
            await asyncio.sleep(0.02)
        moments.append(time.monotonic())
        ready = len(self.began)
        while member.given == given:
            await asyncio.sleep(0.02)
        moments.append(time.monotonic())
        names = ("reserved", "process", "ready", "used")
        seconds = {name: round(moment - moments[0], 2) for name, moment in zip(names, moments[1:], strict=True)}
        ended = {"steps_until_used": len(self.began) - steps, "steps_from_ready_until_used": len(self.began) - ready}
        self.found.append({**seconds, **ended})
        print(f"{len(self.found)}: {self.found[-1]}", flush=True)
        await asyncio.to_thread(self.raylets.kill, await adding)
        while member.ready:
            await asyncio.sleep(0.02)

    async def _placed(self, node: str) -> Any:
        """The member of the pool whose engine has its place on that node."""
        while True:
            for member in self.pool.members:
                placement = member.replica.placement  # type: ignore[attr-defined]
                if placement is not None and placement.node.id == node:
                    return member
            await asyncio.sleep(0.02)


def kill_engines(kills: int, seed: int) -> dict[str, Any]:
    return asyncio.run(_run(Blows, kills, seed, nodes=3, replicas=2))


def join_nodes(joins: int, seed: int) -> dict[str, Any]:
    return asyncio.run(_run(Joins, joins, seed, nodes=2, replicas=None))


async def _run(
    kind: type[Blows] | type[Joins], times: int, seed: int, nodes: int, replicas: int | None
) -> dict[str, Any]:
    torch.set_num_threads(1)
    raylets = Raylets(reaped=False)
    for _ in range(nodes):
        raylets.add()
    try:
        async with connected(raylets.address):
            cluster = Cluster(
                EngineSpec(engine=SETTINGS, demand=Demand(1, 0), replicas=replicas, placement="exclude_trainer")
            )
            pool = await cluster.start(print)
            watching = asyncio.create_task(cluster.watch(pool))
            try:
                return await _steps(kind(raylets, pool, random.Random(seed)), pool, times)
            finally:
                watching.cancel()
    finally:
        raylets.close()


async def _steps(blows: Blows | Joins, pool: EnginePool, times: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    store = ObjectStore(lambda: iter(model.named_parameters()), torch.float32)
    words = random.Random(1)
    prompts = (Prompt(tuple(words.randrange(2, 38) for _ in range(8)), id=str(i)) for i in itertools.count())
    params = RolloutParams(
        rollout_batch_size=8, over_sampling_batch_size=12, n_samples_per_prompt=4, max_staleness=STALENESS
    )
    trained: list[Any] = []
    steps = stalest = 0
    began = time.monotonic()
    async with RolloutScheduler(pool, prompts, lambda p, s: float(s.length), params, sampling=SAMPLING) as scheduler:
        await scheduler.update_weights(store.offer(0), version=scheduler.engine_version)
        striking = asyncio.create_task(_strike(blows, times))
        while not striking.done():
            blows.began.append(time.monotonic())
            step = await scheduler.next_batch()
            steps, stalest = steps + 1, max(stalest, int(step.staleness.max()))
            trained += step.groups
            await scheduler.update_weights(store.offer(steps))
        striking.result()
        scheduler.buffer.check()
        discarded = scheduler.buffer.discarded_tokens
    seconds = time.monotonic() - began
    groups = [group.id for group in trained]
    samples = [sample for group in trained for sample in group.samples]
    chosen = blows.rng.sample(samples, min(1000, len(samples)))
    wrong = await _other_than_undisturbed(model, chosen)
    forward = all((np.diff(sample.versions) >= 0).all() for sample in samples)
    assert len(set(groups)) == len(groups), "a group was trained on twice"
    assert stalest <= STALENESS, "the bound was broken"
    assert forward, "versions went back"
    assert not discarded, "tokens were lost"
    return {
        ("kills" if isinstance(blows, Blows) else "joins"): len(blows.found),
        "seconds": round(seconds),
        "steps": steps,
        "groups": len(groups),
        "tokens": sum(sample.length for sample in samples),
        "discarded_tokens": discarded,
        "staleness_max": stalest,
        "staleness_bound": STALENESS,
        "responses_compared": len(chosen),
        "responses_unlike_undisturbed": wrong,
        **blows.summary(),
        "blows": blows.found,
    }


async def _strike(blows: Blows | Joins, times: int) -> None:
    while len(blows.found) < times:
        await blows.strike()


async def _other_than_undisturbed(model: Any, samples: list[Any]) -> int:
    """Of these responses, those that an engine that nothing disturbs does not give."""
    engine = EmbeddedEngine(model, max_num_seqs=16, context_length=256, stop_token_ids=())
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


RECIPE = """
[model]
path = "{model}"
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 4
[rollout]
rollout_batch_size = 8
over_sampling_batch_size = 12
n_samples_per_prompt = 4
max_response_length = 160
max_staleness = {staleness}
[engine]
max_num_seqs = 16
context_length = 256
[cluster]
address = "{address}"
replicas = 2
placement = "exclude_trainer"
[training]
steps = 100000
threads = 1
eval_interval = 0
save_interval = 4
[reporting]
output = "{output}"
trackers = []
"""
HUNG = 12.0
"""Seconds that a driver hangs: longer than an engine may."""


class Driver:
    """`april train` on a cluster, and `april resume` after each of its deaths."""

    def __init__(self, raylets: Raylets, directory: Path) -> None:
        self.raylets = raylets
        self.output, self.log = directory / "run", directory / "log"
        self.found: list[dict[str, Any]] = []
        self.seen: dict[int, tuple[float, ...]] = {}
        """The log of each step before a fault."""
        recipe = directory / "recipe.toml"
        recipe.write_text(RECIPE.format(model=MODEL, staleness=STALENESS, address=raylets.address, output=self.output))
        self._process = self._april("train", recipe)
        self._reach(3)

    def _april(self, *arguments: Any) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "april", *map(str, arguments)]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def steps(self) -> list[dict[str, Any]]:
        file = self.output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "staleness_max" in row]

    def _reach(self, step: int) -> None:
        while len(self.steps) < step:
            assert self._process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def strike(self, kind: str) -> None:
        began = time.monotonic()
        if kind == "driver killed":
            self._process.kill()
            self._process.wait()
            while self.raylets.engines():  # Ray ends them with the driver
                time.sleep(0.05)
        else:
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(HUNG)
        done = self.steps
        self.seen |= {row["step"]: _of_step(row) for row in done}
        if kind == "driver killed":
            self._process = self._april("resume", self.output)
        else:
            self._process.send_signal(signal.SIGCONT)
        self._reach(len(done) + 2)  # those beyond the checkpoint are done again
        back = time.monotonic() - began
        self.found.append({"kind": kind, "back": round(back, 2)})
        print(f"{kind}: two steps on after {back:.1f} s", flush=True)

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


def _of_step(row: dict[str, Any]) -> tuple[float, ...]:
    """The groups of a step, from its log."""
    return tuple(row[name] for name in ("consumed_tokens", "response_length_mean", "reward", "staleness_mean"))


def kill_drivers(kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    kinds = [("driver killed", "driver hung")[i % 4 == 3] for i in range(kills)]
    raylets = Raylets(reaped=False)
    try:
        for _ in range(3):
            raylets.add()
        with tempfile.TemporaryDirectory() as directory:
            driver = Driver(raylets, Path(directory))
            for kind in kinds:
                time.sleep(rng.uniform(0, 4))
                driver.strike(kind)
            driver.end()
            return _drivers_found(driver)
    finally:
        raylets.close()


def _drivers_found(driver: Driver) -> dict[str, Any]:
    rows = driver.steps
    tables = [pq.read_table(file, columns=["held_out", "group", "sample"]).to_pylist() for file in _tables(driver)]
    trained = [(row["group"], row["sample"]) for table in tables for row in table if not row["held_out"]]
    unlike = sum(_of_step(rows[step - 1]) != logged for step, logged in driver.seen.items())
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "a step is missing, or there twice"
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    assert max(row["staleness_max"] for row in rows) <= STALENESS, "the bound was broken"
    assert not rows[-1]["discarded_tokens"], "tokens were lost"
    return {
        "kills": len(driver.found),
        "steps": len(rows),
        "samples": len(trained),
        "discarded_tokens": rows[-1]["discarded_tokens"],
        "staleness_max": max(row["staleness_max"] for row in rows),
        "staleness_bound": STALENESS,
        "steps_seen_before_blows": len(driver.seen),
        "of_them_other_at_the_end": unlike,
        "by_kind": {
            kind: {
                "count": len(back),
                "back_median": round(statistics.median(back), 2),
                "back_max": max(back),
            }
            for kind in ("driver killed", "driver hung")
            if (back := [blow["back"] for blow in driver.found if blow["kind"] == kind])
        },
        "blows": driver.found,
    }


def _tables(driver: Driver) -> list[Path]:
    return sorted((driver.output / "completions").glob("*.parquet"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=42, help="of engines and nodes; 0: those of the file")
    parser.add_argument("--drivers", type=int, default=8, help="kills of drivers; 0: those of the file")
    parser.add_argument("--joins", type=int, default=5, help="nodes that join; 0: those of the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="   %(message)s")
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    about = {
        "command": " ".join(["benchmarks/cluster_kills.py", *sys.argv[1:]]),
        "machine": machine() | {"ray": ray.__version__},
    }
    for part, kills, of in (
        ("engines and nodes", options.kills, kill_engines),
        ("drivers", options.drivers, kill_drivers),
        ("joins", options.joins, join_nodes),
    ):
        if kills:
            found[part] = {**about, **of(kills, options.seed)}
            options.output.write_text(json.dumps(found, indent=2) + "\n")
            print(json.dumps({name: value for name, value in found[part].items() if name != "blows"}, indent=2))


if __name__ == "__main__":
    main()
