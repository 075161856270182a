"""A cluster whose nodes have networks of their own that can be cut: as with a pulled cable, all processes keep running.

Runs as a separate program, in namespaces that any user may create (`ALONE`); all processes that it starts end with it.
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.ray.cluster import Cluster, EngineSpec
from april.engines.ray.driver import connected
from april.engines.ray.nodes import nodes_now
from april.engines.ray.object_store import ObjectStore
from april.engines.ray.placement import Demand
from tests import tiny
from tests.cluster.test_engines import finish, some_samples, until

ALONE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
HEAD = "10.77.0.1"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory", "80000000"]
LINKED = """
echo && read _
ip link set lo up && ip address add {address}/30 dev {link} && ip link set {link} up
ip route add default via {gateway}
until unshare --pid --fork --kill-child --mount-proc "$@"; do :; done
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def start_head() -> str:
    """Its address; it has no CPUs, so engines are on the nodes that are added."""
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{HEAD}/32", "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # from node to node
    command = [*RAY, "--head", "--node-ip-address", HEAD, "--num-cpus", "0", "--include-dashboard", "false"]
    subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        with suppress(OSError):
            socket.create_connection((HEAD, 6379)).close()
            return f"{HEAD}:6379"
        time.sleep(0.2)


def add_node(number: int, address: str) -> None:
    """A node behind a link of its own, with one CPU."""
    here, there = f"here-{number}", f"there-{number}"
    gateway, own = f"10.77.{number}.1", f"10.77.{number}.2"
    script = LINKED.format(address=own, link=there, gateway=gateway)
    ray = [*RAY, "--address", address, "--node-ip-address", own, "--num-cpus", "1"]
    node = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script, "node", *ray], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    assert node.stdin is not None
    node.stdout.readline()  # from here on it is in its own network
    ip("link", "add", here, "type", "veth", "peer", "name", there)
    ip("link", "set", there, "netns", str(node.pid))
    ip("address", "add", f"{gateway}/30", "dev", here)
    ip("link", "set", here, "up")
    node.stdin.write("\n")
    node.stdin.flush()


def link(number: int, state: str) -> None:
    """Cut a node's network ("down"), or mend it ("up")."""
    ip("link", "set", f"here-{number}", state)


async def cut_and_mend(directory: Path) -> None:
    """The network of an engine's node is cut in mid-token: nothing is lost or twice, and the engine comes back with the
    weights that are current by then."""
    torch.set_num_threads(1)
    tiny.save(directory / "policy")
    trained = AutoModelForCausalLM.from_pretrained(directory / "policy")
    settings: dict[str, Any] = {"max_num_seqs": 12, "context_length": 500}
    first, second = some_samples(24, 400), some_samples(24, 60)
    own = EmbeddedEngine(trained, stop_token_ids=(), **settings)
    expected = copy.deepcopy(first)
    for sample in expected:
        own.submit(sample)
    await finish(own, expected)

    address = start_head()
    for number in (1, 2):
        add_node(number, address)
    async with connected(address):
        await until(lambda: len(nodes_now()) == 3)
        wanted = EmbeddedSettings(model=str(directory / "policy"), threads=1, **settings)
        cluster = Cluster(EngineSpec(engine=wanted, demand=Demand(1, 0), replicas=2, placement="exclude_trainer"))
        pool = await cluster.start(lambda what: None)
        watching = asyncio.create_task(cluster.watch(pool))
        try:
            store = ObjectStore(lambda: iter(trained.named_parameters()), torch.float32)
            await pool.update_weights(1, store.offer(1))
            for sample in first:
                pool.submit(sample)
            for chunk in await pool.poll():
                sample = next(sample for sample in first if sample.id == chunk.sample_id)
                sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            victim = next(member for member in pool.members if member.samples)
            number = int(victim.replica.place.split(".")[2])
            link(number, "down")
            cut = time.monotonic()
            await until(lambda: not victim.ready)
            print(f"seen after {time.monotonic() - cut:.1f} s", flush=True)
            await finish(pool, [sample for sample in first if sample.finish is None])
            assert [s.response_ids for s in first] == [s.response_ids for s in expected]
            await pool.update_weights(2, store.offer(2))
            link(number, "up")
            mended = time.monotonic()
            await until(lambda: all(member.ready for member in pool.members))
            print(f"back after {time.monotonic() - mended:.1f} s", flush=True)
            assert victim.replica.place == f"10.77.{number}.2", "there is no room but on its node"
            for sample in second:
                pool.submit(sample)
            assert min(len(member.samples) for member in pool.members) > 0, "both have work"
            await finish(pool, second)
            assert {version for sample in second for version in sample.versions} == {2}
        finally:
            watching.cancel()
            await pool.close()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # Ray's sockets have short names
        os.environ |= {"RAY_TMPDIR": place, "RAY_AUTH_MODE": "disabled"}
        asyncio.run(cut_and_mend(Path(place)))


if __name__ == "__main__":
    main()
