"""Ranks of the trainer on nodes of a real cluster, which are killed, hang and run out of memory: the run is
unaffected."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from ray._private import ray_constants
from ray.util import placement_group_table

from april import EngineError
from april.engines.ray import process_placements
from april.engines.ray.driver import connected
from april.engines.ray.node_process import NodeProcess
from april.engines.ray.node_requirements import NodeRequirements, marked
from april.engines.ray.nodes import alive_nodes
from april.engines.ray.placement import Demand, Node
from april.engines.ray.process_actor import ProcessSettings
from april.engines.ray.process_placements import ProcessPlacements
from april.reporting.metrics_log import last_step
from april.training.rank_protocol import ON_NODE, STATUS_FD
from tests import tiny
from tests.cluster.raylets import Raylets
from tests.cluster.test_run import april, ended, until
from tests.limits import HANG
from tests.processes import below, processes, reachable
from tests.ranks.runs import recipe_in, trained

SCARCE = 64 << 20
"""Bytes: more than a rank takes between two passes over a batch, and less than one of those takes."""


def one_rank_elsewhere(base: Path, address: str) -> Path:
    """A recipe whose training batches do not depend on time or on interruptions."""
    recipe = recipe_in(base, "run")
    fixed = recipe.read_text().replace(
        "over_sampling_batch_size = 6", "over_sampling_batch_size = 4\nmax_staleness = 0"
    )
    recipe.write_text(f'{fixed}[cluster]\naddress = "{address}"\nranks = "nodes"\nreplicas = 1\n')
    return recipe


def starved(pid: int) -> Callable[[], bool]:
    """Return a function that reports whether the process has ended, and that limits its memory to its smallest size so
    far and `SCARCE` more."""
    least = held = 1 << 62

    def gone() -> bool:
        nonlocal least, held
        try:
            held = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            if 0 < held < least:
                least = held
                resource.prlimit(pid, resource.RLIMIT_AS, (least + SCARCE, resource.RLIM_INFINITY))
        except (FileNotFoundError, ProcessLookupError):
            return True
        return held == 0  # it has ended, and its status has not been collected

    return gone


def test_a_run_with_a_memory_shortage_and_two_lost_nodes_equals_a_run_on_one_machine(
    raylets: Raylets, tmp_path: Path
) -> None:
    """The first node is killed, the second one hangs; at the end the rank is on the third."""
    recipe, run = one_rank_elsewhere(tmp_path, raylets.address), tmp_path / "run"
    tiny.save(tmp_path / "policy", sharpness=1.0, hidden_size=16, intermediate_size=65536, num_hidden_layers=1)
    first = raylets.add(2)
    process = april("train", recipe, "--steps", 2000)

    def later(steps: int) -> Callable[[], bool]:
        return lambda: last_step(run) >= steps

    until(later(3), process)
    (rank,) = raylets.ranks(first)
    until(starved(rank), process)
    until(later(last_step(run) + 1), process)
    second, third = raylets.add(2), raylets.add(2)
    raylets.kill(first)
    until(lambda: bool(raylets.ranks(second, third)), process)
    until(later(last_step(run) + 1), process)
    hung, other = (second, third) if raylets.ranks(second) else (third, second)
    raylets.signal(hung, signal.SIGSTOP)
    until(lambda: bool(raylets.ranks(other)), process)
    until(later(last_step(run) + 1), process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "rank 1 on the node at" in said
    assert "rank 1 ran out of memory; micro-batches have 256 tokens after the restart; all ranks restart" in said
    assert said.count("all ranks restart") >= 3, said
    raylets.signal(hung, signal.SIGCONT)

    steps = last_step(run)
    here = tmp_path / "here"
    ended(april("train", recipe, "--cluster.ranks", "driver", "--steps", steps, "--output", here))
    found, expected = trained(run), trained(here)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row, other_row in zip(found, expected, strict=True):
        assert row == pytest.approx(other_row, rel=1e-4, abs=1e-6)


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which Ray listens on the loopback interface only, because it is configured for one machine."""
    monkeypatch.setenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    return "127.0.0.1"


def test_a_run_on_loopback_ends_with_its_ranks_when_its_head_hangs(on_loopback: str, tmp_path: Path) -> None:
    lost = Raylets(address=on_loopback)
    try:
        node = lost.add(2)
        recipe = one_rank_elsewhere(tmp_path, lost.address)
        served = 'trackers = ["prometheus"]\nprometheus_address = "127.0.0.1:0"'
        recipe.write_text(recipe.read_text().replace("trackers = []", served))
        process = april("train", recipe, "--steps", 2000)
        until(lambda: last_step(tmp_path / "run") >= 1, process)
        (rank,), (engine,) = lost.ranks(node), lost.engines(node)
        for part in (list(below(process.pid)), [rank], [engine]):
            listening = reachable(part)
            assert set(listening.values()) == {False}, listening
        lost.signal_head(signal.SIGSTOP, "gcs_server")
        said, _ = process.communicate(timeout=HANG)
        assert process.returncode == 1, said
        assert "the head of the Ray cluster has not answered for" in said
        until(lambda: not lost.ranks(node))
    finally:
        lost.close()


def test_ranks_that_fit_are_reported_before_a_start(raylets: Raylets, tmp_path: Path) -> None:
    raylets.add(2)
    recipe = one_rank_elsewhere(tmp_path, raylets.address)
    checked = april("cluster", "check", recipe, "--processes", 4)
    said, _ = checked.communicate(timeout=HANG)
    assert checked.returncode == 1
    assert "2 of 3 ranks fit, each with 1 CPU" in said
    assert "add nodes for 1 more ranks, or lower trainer.processes to 3" in said
    assert "0 of 1 engines fit" in said


async def test_a_stop_ends_the_reservation_of_nodes_at_once(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raylets.add(1)
    monkeypatch.setattr(process_placements, "RESERVING", 100 * HANG)

    async def taken_meanwhile() -> list[Node]:
        return [replace(node, cpus=9) for node in await alive_nodes()]

    monkeypatch.setattr(process_placements, "alive_nodes", taken_meanwhile)

    def reserving() -> list[str]:
        return [each["state"] for each in placement_group_table().values() if each["state"] == "PENDING"]

    async with connected(raylets.address):
        settings = ProcessSettings(
            module="tests.cluster.program", requirements=NodeRequirements(""), directory=os.getcwd(), line=STATUS_FD
        )
        taking = ProcessPlacements(Demand(9, 0)).take(1, settings, lambda why: True, lambda: bool(reserving()))
        with pytest.raises(EngineError, match="stopped before the ranks had nodes"):
            await asyncio.wait_for(taking, HANG)
        assert not reserving(), "what was asked for is given back"


async def test_programs_on_nodes_end_or_are_lost_and_release_their_resources(raylets: Raylets, tmp_path: Path) -> None:
    raylets.add(3)

    def come(process: NodeProcess) -> dict[str, str]:
        """The first report of the process."""
        rest = b""
        while b'"pid"' not in rest or not rest.endswith(b"\n"):
            rest += os.read(process.line, 1 << 16)
        (line,) = (line for line in rest.decode().splitlines() if "pid" in line)
        return dict(json.loads(line))

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    async with connected(raylets.address):
        places = ProcessPlacements(Demand(1, 0))
        with marked(tmp_path) as marker:
            requirements = NodeRequirements("org/model", tmp_path, marker)
            settings = ProcessSettings(
                module="tests.cluster.program", requirements=requirements, directory=os.getcwd(), line=STATUS_FD
            )
            placements = await places.take(3, settings, lambda why: True)
        with pytest.raises(EngineError, match="0 of 1 ranks fit, each with 1 CPU"):
            await places.take(1, settings, lambda why: False)

        logs = [tmp_path / f"{rank}.log" for rank in (1, 2, 3)]
        ends, killed, left = (
            NodeProcess(placement, {"RANK": str(rank), ON_NODE: "1"}, told, logs[rank - 1])
            for rank, placement, told in zip((1, 2, 3), placements, ("3", "wait", "wait"), strict=True)
        )
        assert come(ends)["rank"] == "1"
        until(lambda: ends.poll() is not None)
        assert (ends.returncode, ends.lost, logs[0].read_text()) == (3, "", "so it ends\n")
        os.kill(int(come(killed)["pid"]), signal.SIGKILL)
        until(lambda: killed.poll() is not None)
        assert (killed.returncode, killed.lost) == (-signal.SIGKILL, "")
        pid = int(come(left)["pid"])
        os.kill(processes()[pid][0], signal.SIGKILL)
        until(lambda: left.poll() is not None)
        assert left.returncode == -signal.SIGKILL
        assert "on the node at 127.0.0" in left.lost
        until(lambda: gone(pid))
        for process in (ends, killed, left):
            await asyncio.to_thread(process.kill)
            os.close(process.line)

        # All is free again; but now the nodes do not see what the trainer writes.
        given_up = time.monotonic() + HANG
        with pytest.raises(EngineError, match=f"reporting.output = '{tmp_path}' is not the same directory there"):
            await places.take(3, settings, lambda why: "directory" not in why and time.monotonic() < given_up)
