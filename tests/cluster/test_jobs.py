"""A cluster with token authentication: accepted and refused clients, and `april train` as a job of the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from tests.cluster.test_run import a_recipe, april, ended, steps, until
from tests.limits import HANG
from tests.processes import below, processes

SUBMIT = Path(__file__).parents[2] / "examples" / "cluster" / "ray_job.sh"


@dataclass
class Guarded:
    """A cluster with a token, which is in the environment."""

    address: str
    dashboard: str
    pid: int

    def processes(self, name: str, command: str = "") -> list[int]:
        """The cluster's processes with this name."""
        alive = processes()
        mine = [(pid, alive.get(pid, (0, ""))[1]) for pid in below(self.pid)]
        return [pid for pid, said in mine if said.startswith(name) and command in said]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray looks for a token, too
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", "a" * 32)
        environment.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # of ray and april
        command = [sys.executable, "-m", "tests.cluster.other_cluster"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
            assert cluster.stdout is not None
            yield Guarded(*cluster.stdout.readline().split(), cluster.pid)
            cluster.communicate()


def test_a_cluster_with_authentication_gets_its_token_from_the_environment(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(tmp_path, guarded.address, replicas=1)
    said = ended(april("cluster", "check", recipe))
    assert "1 of 1 engines fit" in said

    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 32)
    wrong = april("cluster", "check", recipe)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    without = april("cluster", "check", recipe)
    said, _ = wrong.communicate(timeout=HANG)
    assert "does not let this process in" in said.splitlines()[-1]
    assert "RAY_AUTH_TOKEN" in said.splitlines()[-1]
    said, _ = without.communicate(timeout=HANG)
    assert said.splitlines()[-1].startswith("april: RAY_AUTH_MODE=token, but there is no token")
    assert wrong.returncode == without.returncode != 0


def submitted(cluster: Guarded, *command: str | Path) -> subprocess.Popen[str]:
    """A job that was handed in by the script of the examples."""
    # Ray gives a job the address of the newest cluster of its machine, and tests may run at the same time.
    return subprocess.Popen(
        ["bash", str(SUBMIT), cluster.dashboard, *map(str, command), "--cluster.address", cluster.address],
        env={**os.environ, "TRAINER_GPUS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_job_fails_and_a_second_job_resumes_the_run_and_saves_it_when_stopped(
    guarded: Guarded, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    job = submitted(guarded, "train", a_recipe(tmp_path, guarded.address, replicas=1), "--steps", "2000")
    until(lambda: len(steps(tmp_path)) >= 2, job)
    assert len(guarded.processes("ray::EngineActor")) == 1
    (driver,) = guarded.processes(f"{sys.executable} ", "april train")
    os.kill(driver, signal.SIGKILL)
    said, _ = job.communicate(timeout=HANG)
    assert job.returncode == 1, said
    assert "held-out reward" in said, "what the run prints is the job's log"
    until(lambda: not guarded.processes("ray::EngineActor"))

    done = len(steps(tmp_path))
    job = submitted(guarded, "resume", output)
    until(lambda: len(steps(tmp_path)) >= done + 2, job)
    (driver,) = guarded.processes(f"{sys.executable} ", "april resume")
    log = Path(os.readlink(f"/proc/{driver}/fd/1"))
    name = log.stem.removeprefix("job-driver-")
    subprocess.run(["ray", "job", "stop", "--address", guarded.dashboard, name], check=True, timeout=HANG)
    said, _ = job.communicate(timeout=HANG)
    assert f"Stopped. To resume: april resume {output}" in said
    found = steps(tmp_path)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert (output / "checkpoints" / f"step-{len(found):06}" / "manifest.json").exists()
    until(lambda: not guarded.processes("ray::EngineActor"))
    assert "terminated gracefully" in (log.parent / "jobs" / f"supervisor-{name}.log").read_text()
