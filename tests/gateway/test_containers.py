"""Programs in containers: command lines, refusals, and a stand-in for an engine that runs the command on this machine.

No machine of these tests has a container engine; the options are those of Docker 28, Podman 5 and Apptainer 1.4.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from april.gateway import containers
from april.gateway.agent import CommandProgram
from april.gateway.containers import Container, engine_fault, usable_engine
from tests.gateway.scripted import ScriptedPolicy
from tests.gateway.test_agent import OPENAI, run

STAND_IN = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(words), file=log)
if words[0] in ("version", "info"):
    sys.exit({probe})
if words[0] == "rm":
    sys.exit()
command = words[words.index("image:1") + 1 :]
given = {{word.removeprefix("--env=") for word in words if word.startswith("--env=")}}
kept = {{name: value for name, value in os.environ.items() if name in given or name == "PATH"}}
folder = next(word.removeprefix("--workdir=") for word in words if word.startswith("--workdir="))
os.chdir(folder)
os.execve({python!r}, [{python!r}, *command[1:]], kept)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in for Docker; returns its calls."""
    import sys

    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    engine = bin_folder / "docker"
    engine.write_text(STAND_IN.format(python=sys.executable, log=str(log), probe=0))
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    engine_fault.cache_clear()
    yield lambda: [json.loads(line) for line in log.read_text().splitlines()]
    engine_fault.cache_clear()


async def test_a_command_runs_in_the_image(tmp_path, docker, monkeypatch):
    monkeypatch.setenv("OTHER_SETTING", "x")
    monkeypatch.setenv("MY_KEY", "of the user")
    (tmp_path / "agent.py").write_text(OPENAI + 'import os; assert "OTHER_SETTING" not in os.environ\n')
    program = CommandProgram(["python", str(tmp_path / "agent.py")], ["MY_KEY"], "image:1")
    outcome = await run(program, ScriptedPolicy(["32"]))
    assert outcome.reward == 2.0
    probe, words = docker()
    assert probe[0] == "version"
    assert words[:4] == ["run", "--rm", "--interactive", "--init"]
    assert f"--volume={tmp_path}:{tmp_path}:ro" in words
    assert {"--network=host", "--env=OPENAI_API_KEY", "--env=MY_KEY"} <= set(words)
    assert words[-3:] == ["image:1", "python", str(tmp_path / "agent.py")]
    assert "of the user" not in json.dumps(words)


async def test_a_container_is_removed_with_its_episode(tmp_path, docker):
    (tmp_path / "agent.py").write_text("import time; open('begun', 'w'); time.sleep(3600)")
    program = CommandProgram(["python", str(tmp_path / "agent.py")], image="image:1")
    running = asyncio.create_task(run(program))
    while len(docker()) < 2:
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running})
    name = next(word.removeprefix("--name=") for word in docker()[1] if word.startswith("--name="))
    assert docker()[-1] == ["rm", "--force", name]


def test_the_command_line_of_apptainer():
    container = Container("apptainer", "docker://python:3.12", "april-x")
    assert container.command(["python", "/a/b.py"], "/tmp/f", ["KEY"], ["/a"]) == [
        *("apptainer", "exec", "--containall", "--cleanenv", "--bind=/tmp/f:/tmp/f", "--pwd=/tmp/f"),
        *("--bind=/a:/a:ro", "docker://python:3.12", "python", "/a/b.py"),
    ]
    assert container.environment({"KEY": "v"}) == {"APPTAINERENV_KEY": "v"}


def test_a_machine_without_an_engine_refuses_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    engine_fault.cache_clear()
    with pytest.raises(ValueError, match=r"environment\.image needs a container engine") as refused:
        CommandProgram(["python", "-c", "pass"], image="image:1")
    assert "no docker or podman or apptainer or singularity in PATH" in str(refused.value)
    with pytest.raises(ValueError, match="no apptainer in PATH"):
        usable_engine("apptainer")
    engine_fault.cache_clear()


def test_an_engine_whose_service_does_not_run_is_named(tmp_path, monkeypatch):
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\necho first >&2\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path('/bin')}")
    monkeypatch.setattr(containers, "ENGINES", ("docker",))
    engine_fault.cache_clear()
    with pytest.raises(ValueError, match=r"no usable one \(docker: Cannot connect to the Docker daemon\)"):
        usable_engine()
    engine_fault.cache_clear()
