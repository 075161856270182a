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
from april.gateway.access import Access
from april.gateway.agent import CommandProgram
from april.gateway.containers import Container, engine_fault, usable_engine
from tests.gateway.scripted import ScriptedPolicy, until
from tests.gateway.test_agent import OPENAI, run

STAND_IN = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(words), file=log)
if words[0] in ("version", "info"):
    sys.exit({probe})
if words[0] == "ps":
    print("old-1")
    print("old-2")
if words[0] in ("ps", "rm"):
    time.sleep(float(os.environ.get("SLOW_" + words[0].upper(), 0)))
    with open({log!r}, "a") as log:
        print(json.dumps(["done", words[0]]), file=log)
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
    monkeypatch.chdir(tmp_path)
    program = CommandProgram(["python", "agent.py"], ["MY_KEY"], "image:1")
    outcome = await run(program, ScriptedPolicy(["32"]))
    assert outcome.reward == 2.0
    probe, words = docker()
    assert probe[0] == "version"
    assert words[:4] == ["run", "--rm", "--interactive", "--init"]
    assert f"--volume={tmp_path}:{tmp_path}:ro" in words
    assert {"--network=host", "--env=OPENAI_API_KEY", "--env=MY_KEY"} <= set(words)
    assert words[-3:] == ["image:1", "python", str(tmp_path / "agent.py")]
    assert "of the user" not in json.dumps(words)


def mounts(command: list[str]) -> set[str]:
    program = CommandProgram(command, image="image:1")
    given, _ = program._contained(
        Container("docker", "image:1", "april-x"), Access("http://a", "s", "p", "m"), "/tmp/f"
    )
    volumes = [word.removeprefix("--volume=").split(":") for word in given if word.startswith("--volume=")]
    assert given[given.index("image:1") + 1] == command[0]
    return {path for path, *mode in volumes if mode[1:] == ["ro"]}


def test_a_container_sees_what_relative_paths_name_and_nothing_else(tmp_path, docker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("agents/agent.py", "configs/conf.yaml", "data/part/rows.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    command = [
        "/bin/sh",
        "agents/agent.py",
        "--config=configs/conf.yaml",
        "data/part",
        "/tmp",
        "/usr/bin/env",
        "none/x",
    ]
    assert mounts(command) == {str(tmp_path / name) for name in ("agents", "configs", "data/part")}
    assert mounts(["python", "-m", "agents.agent"]) == {str(tmp_path)}
    assert mounts(["python", str(tmp_path / "agents" / "agent.py")]) == set()


@pytest.mark.parametrize(
    ("command", "folder", "named"),
    [
        (["python", "etc/hostname"], "/", "/etc"),
        (["cat", "../bin/sh"], "/tmp", "/bin"),
        (["python", "-m", "x"], "/", "/"),
    ],
)
def test_a_folder_of_the_images_system_is_refused(docker, monkeypatch, command, folder, named):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=f"would mount {named} over the image's own; move it"):
        CommandProgram(command, image="image:1")


async def begun(program: CommandProgram, docker, tmp_path) -> tuple[asyncio.Task, str]:
    """Start an episode; return it, and the name of its container, whose program runs."""
    running = asyncio.create_task(run(program))
    await until((tmp_path / "up").exists, running)
    words = next(words for words in docker() if words[0] == "run")
    return running, next(word.removeprefix("--name=") for word in words if word.startswith("--name="))


@pytest.fixture
def endless(tmp_path, docker, monkeypatch) -> CommandProgram:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: open('" + str(tmp_path) + "/term', 'w'))\n"
        "input(); open('" + str(tmp_path) + "/up', 'w')\nwhile True: time.sleep(1)"
    )
    return CommandProgram(["python", "agent.py"], image="image:1")


async def test_a_container_is_removed_with_its_episode(endless, docker, tmp_path, monkeypatch):
    monkeypatch.setattr("april.gateway.agent.GRACE", 0.0)
    running, name = await begun(endless, docker, tmp_path)
    running.cancel()
    await asyncio.wait({running})
    assert docker()[-2:] == [["rm", "--force", name], ["done", "rm"]]


async def test_a_removal_survives_further_cancellations(endless, docker, tmp_path, monkeypatch):
    monkeypatch.setattr("april.gateway.agent.GRACE", 1000.0)
    monkeypatch.setenv("SLOW_RM", "0.5")
    running, name = await begun(endless, docker, tmp_path)
    running.cancel()
    await until((tmp_path / "term").exists, running)
    running.cancel()
    await until(lambda: docker()[-1] == ["rm", "--force", name], running)
    running.cancel()
    await asyncio.wait({running})
    await endless.close()
    assert docker()[-1] == ["done", "rm"]


async def test_a_removal_has_a_time_limit(endless, docker, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("april.gateway.agent.GRACE", 0.0)
    monkeypatch.setattr(containers, "REMOVE_SECONDS", 0.2)
    monkeypatch.setenv("SLOW_RM", "3600")
    running, name = await begun(endless, docker, tmp_path)
    running.cancel()
    await asyncio.wait({running}, timeout=30)
    assert running.done()
    assert f"docker rm --force {name} did not end within 0.2 s" in caplog.text


async def test_a_run_removes_what_an_earlier_process_of_it_has_left(endless, docker):
    await endless.begin("r1")
    listing, _, removal, _ = docker()[1:]
    assert listing == ["ps", "--all", "--quiet", "--filter=label=april.run=r1"]
    assert removal == ["rm", "--force", "old-1", "old-2"]
    assert "--label=april.run=r1" in Container("docker", "image:1", "x", "r1").command(["a"], "/tmp/f", [])
    assert endless._containers.new("x").run == "r1"


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
