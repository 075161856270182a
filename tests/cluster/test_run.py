"""Runs on a real cluster of several raylets, from the command line, and what becomes of them when something dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from tests import tiny
from tests.cluster.raylets import Raylets
from tests.limits import HANG


def until(condition: Callable[[], bool], run: subprocess.Popen[str] | None = None, generous: float = HANG) -> None:
    """Wait for a condition, as long as a run continues, if a run is given."""
    given_up = time.monotonic() + generous
    while not condition():
        assert run is None or run.poll() is None, f"the run ended early:\n{run.communicate()[0]}"
        assert time.monotonic() < given_up
        time.sleep(0.05)


def a_recipe(directory: Path, address: str, **settings: Any) -> Path:
    tiny.save(directory / "policy")
    recipe = directory / "recipe.toml"
    cluster = {"address": address, "replicas": 2, **settings}
    lines = [f"{name} = {json.dumps(value)}" for name, value in cluster.items()]
    recipe.write_text("\n".join([tiny.RECIPE.replace("OUT", str(directory / "run")), "[cluster]", *lines]))
    return recipe


ECHO = '''
from april import EnvStep


class Echo:
    """Says how many words it heard, and rewards them."""

    def reset(self, prompt, seed):
        self.words = 0
        return "?"

    def step(self, turn):
        self.words += len(turn.text.split())
        return EnvStep(f" {self.words}:", self.words / 8)

    def close(self):
        pass
'''


def april(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "april", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(run: subprocess.Popen[str], seconds: float = HANG) -> str:
    """Return the output of a run that succeeded."""
    said, _ = run.communicate(timeout=seconds)
    assert run.returncode == 0, said
    return said


def steps(directory: Path) -> list[dict[str, Any]]:
    file = directory / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if "staleness_max" in row]


def test_a_run_on_two_nodes_survives_the_loss_of_an_engine_and_of_its_driver(raylets: Raylets, tmp_path: Path) -> None:
    nodes = [raylets.add(), raylets.add()]
    run = april("train", a_recipe(tmp_path, raylets.address), "--steps", 2000, "--save-interval", 5)
    until(lambda: len(steps(tmp_path)) >= 2, run)
    victims = raylets.engines(*nodes)
    assert [len(raylets.engines(node)) for node in nodes] == [1, 1]

    os.kill(victims[0], signal.SIGKILL)
    until(lambda: len(set(raylets.engines()) - set(victims)) == 1, run)
    behind = len(steps(tmp_path))
    until(lambda: len(steps(tmp_path)) >= behind + 2, run)

    os.kill(run.pid, signal.SIGKILL)
    said, _ = run.communicate()
    assert "is lost: its process has died" in said
    assert "(raylet)" not in said, "Ray says it, too, at length: in the run's log of libraries"
    until(lambda: not raylets.engines())  # ended by Ray, with the run that owned them
    done = len(steps(tmp_path))
    said = ended(april("resume", tmp_path / "run", "--steps", done + 2))
    found = steps(tmp_path)
    assert [row["step"] for row in found] == list(range(1, done + 3)), said
    assert max(row["staleness_max"] for row in found) <= 2
    until(lambda: not raylets.engines())


def test_engines_that_fit_are_reported_before_a_start(raylets: Raylets, tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, raylets.address)
    raylets.add(gpus=1)
    with_gpus, checked = [april("cluster", "check", recipe, "--model.device", device) for device in ("auto", "cpu")]
    said, _ = with_gpus.communicate(timeout=HANG)
    assert "1 of 2 engines fit, each with 1 GPU and 1 CPU" in said
    said, _ = checked.communicate(timeout=HANG)
    assert checked.returncode == 1
    assert "1 of 2 engines fit, each with 1 CPU" in said
    assert "add nodes for 1 more with 1 CPU free for each" in said
    said = ended(april("cluster", "check", recipe, "--model.device", "cpu", "--cluster.replicas", "auto"))
    assert "1 engines, each with 1 CPU" in said
    bfloat16 = ("--model.dtype", "bfloat16", "--learning-rate", "1e-3")
    checked = april("cluster", "check", recipe, *bfloat16, "--cluster.placement", "trainer_only")
    said, _ = checked.communicate(timeout=HANG)
    assert 'left out by placement = "trainer_only"' in said
    assert not raylets.engines()


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hung"])
def test_a_run_stops_when_its_head_dies_and_resumes_on_another_cluster(tmp_path: Path, hangs: bool) -> None:
    lost = Raylets()
    try:
        lost.add(2)
        run = april("train", a_recipe(tmp_path, lost.address), "--steps", 2000, "--save-interval", 5)
        until(lambda: len(steps(tmp_path)) >= 2, run)
        if hangs:
            lost.signal_head(signal.SIGSTOP)
        else:
            lost.kill_head()
        said, _ = run.communicate(timeout=HANG)
        assert run.returncode != 0, said
        assert not hangs or "the head of the Ray cluster has not answered for 20 s" in said
    finally:
        lost.close()
    done = len(steps(tmp_path))
    other = Raylets()
    try:
        other.add(2)
        ended(april("resume", tmp_path / "run", "--steps", done + 2, "--cluster.address", other.address))
    finally:
        other.close()
    found = steps(tmp_path)
    assert [row["step"] for row in found] == list(range(1, done + 3)), said


def test_a_run_with_rewards_and_environments_on_nodes_survives_the_loss_of_a_node(
    raylets: Raylets, tmp_path: Path
) -> None:
    nodes = [raylets.add(), raylets.add()]
    (tmp_path / "echo.py").write_text(ECHO)
    on_nodes = 'rewards = "nodes"\nenvironments = "nodes"\n'
    recipe = tiny.recipe(
        tmp_path,
        rollout="stop_token_ids = [20, 21, 22, 23]\nreward_workers = 1\n",
        environment='path = "echo.py:Echo"\nmax_turns = 4\nreward = "sum"\nworkers = 1\n',
        cluster=f'address = "{raylets.address}"\nreplicas = "auto"\n{on_nodes}',
    )
    said = ended(april("cluster", "check", recipe))
    assert "2 engines, each with 1 CPU" in said
    run = april("train", recipe, "--steps", 2000)
    until(lambda: len(steps(tmp_path)) >= 2, run)
    assert [len(raylets.callers(node)) for node in nodes] == [2, 2], "one for rewards, one for environments"

    raylets.kill(nodes[0])
    until(lambda: steps(tmp_path)[-1]["engines_ready"] == 1, run)
    joined = raylets.add()
    until(lambda: len(raylets.callers(joined)) == 2, run)
    until(lambda: steps(tmp_path)[-1]["engines_ready"] == 2, run)
    behind = len(steps(tmp_path))
    # On a busy machine a short step may end before the engine of the new node has drawn a token.
    until(lambda: any(row["engines_used"] == 2 for row in steps(tmp_path)[behind:]), run)

    os.kill(run.pid, signal.SIGINT)
    run.communicate(timeout=HANG)
    found = steps(tmp_path)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert max(row["staleness_max"] for row in found) <= 2
    assert all(row["turns_mean"] > 1 for row in found)
    until(lambda: not raylets.callers() and not raylets.engines())


def test_a_node_that_cannot_construct_the_environment_is_named(raylets: Raylets, tmp_path: Path) -> None:
    raylets.add()
    (tmp_path / "echo.py").write_text("import os\nassert 'RAY_JOB_ID' not in os.environ, 'no world here'\n" + ECHO)
    recipe = tiny.recipe(
        tmp_path,
        environment='path = "echo.py:Echo"\n',
        cluster=f'address = "{raylets.address}"\nreplicas = 1\nenvironments = "nodes"\n',
    )
    checked = april("cluster", "check", recipe)
    said, _ = checked.communicate(timeout=HANG)
    assert checked.returncode == 1, said
    assert said.count("no environment: it cannot be made there") == 2, "the head's node, and the other one"
    assert said.count("no world here") == 2
