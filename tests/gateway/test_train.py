"""`april train` with programs: real clients play with tools, and are interrupted by updates in the middle of turns."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from april.reporting.metrics_log import read_metrics
from tests.forked import run as april

ROOT = Path(__file__).parents[2]
RECIPE = """
[model]
path = "{root}/examples/gcd_tool/model"
[environment]
{program}
max_turns = 48
[task]
kind = "reasoning_gym"
name = "gcd"
size = 500
eval_size = 1
[task.params]
min_value = 1
max_value = 16
[rollout]
rollout_batch_size = {groups}
over_sampling_batch_size = {most}
n_samples_per_prompt = 2
max_staleness = 2
max_response_length = 1024
reward_workers = 0
[engine]
max_num_seqs = 24
context_length = 2048
on_update = "keep"
[algorithm]
kl_coef = 0.0
[training]
steps = {steps}
learning_rate = 1e-4
eval_interval = 0
save_interval = 0
threads = 1
[reporting]
output = "{output}"
trackers = []
"""
COMMAND = """
import asyncio, json, sys
sys.path.insert(0, {root!r})
from types import SimpleNamespace
import os
from tests.gateway.programs import with_openai
access = SimpleNamespace(
    address=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    secret=os.environ["OPENAI_API_KEY"],
    model=os.environ["APRIL_MODEL"],
)
print("at work", file=sys.stderr)
print(json.dumps(asyncio.run(with_openai(json.loads(sys.stdin.readline()), access))))
"""


def recipe(tmp_path: Path, program: str, steps: int = 2, groups: int = 2) -> Path:
    path = tmp_path / "recipe.toml"
    most = 3 * groups if groups > 1 else 1
    path.write_text(
        RECIPE.format(root=ROOT, program=program, steps=steps, groups=groups, most=most, output=tmp_path / "run")
    )
    return path


def responses(run: Path) -> list[dict]:
    return [row for file in sorted((run / "completions").glob("*.parquet")) for row in _rows(file)]


def _rows(file: Path) -> list[dict]:
    return pyarrow.parquet.read_table(file).to_pylist()


CLIENTS = {"with_anthropic": "anthropic", "with_openai_agents": "agents", "with_pydantic_ai": "pydantic_ai"} | {
    "with_langgraph": "langgraph"
}


@pytest.mark.parametrize("name", ["with_openai", *(pytest.param(one, marks=pytest.mark.slow) for one in CLIENTS)])
def test_a_function_trains_with_tools_and_interrupted_turns(name: str, tmp_path: Path) -> None:
    pytest.importorskip(CLIENTS.get(name, "openai"))
    programs = f"{ROOT}/tests/gateway/programs.py"
    done = april("train", recipe(tmp_path, f'function = "{programs}:{name}"\nscore = "{programs}:score"'))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    steps = [line for line in read_metrics(tmp_path / "run") if "samples_resumed" in line]
    assert len(steps) == 2
    assert sum(line["samples_resumed"] for line in steps) > 0
    assert {line["sequences_per_episode"] for line in steps} == {1.0}  # each request extends the last one by tokens
    assert {line["environment_failures"] for line in steps} == {0}
    assert max(line["turns_max"] for line in steps) > 2
    assert all(line["reward/messages"] >= 2 for line in steps)


def test_turns_end_at_the_stop_strings_of_a_program(tmp_path: Path) -> None:
    program = f'function = "{ROOT}/tests/gateway/programs.py:with_stop"'
    done = april("train", recipe(tmp_path, program, 2, 2))
    assert done.returncode == 0, done.stderr
    steps = [line for line in read_metrics(tmp_path / "run") if "samples_resumed" in line]
    assert {line["reward/stopped"] for line in steps} == {2.0}
    assert {line["sequences_per_episode"] for line in steps} == {1.0}  # the text before the stop string is found again
    assert {line["environment_failures"] for line in steps} == {0}


def test_turns_are_trained_at_the_temperature_of_their_request(tmp_path: Path) -> None:
    """All tokens are of the policy that is trained, so its log-probabilities are those that the engine recorded."""
    program = f'function = "{ROOT}/tests/gateway/programs.py:with_temperatures"\n[gateway]\nsampling = "request"'
    path = recipe(tmp_path, "PROGRAM", 1, 2)
    text = path.read_text().replace("PROGRAM\nmax_turns = 48", f"max_turns = 48\n{program}")
    path.write_text(text.replace("[algorithm]\n", '[algorithm]\ncorrection = "decoupled"\n'))  # scores before it trains
    done = april("train", path)
    assert done.returncode == 0, done.stderr
    [step] = [line for line in read_metrics(tmp_path / "run") if "kl_behaviour" in line]
    assert step["turns_mean"] == 3
    assert abs(step["kl_behaviour"]) < 1e-4
    assert 0.99 < step["ratio_mean"] < 1.01


def test_a_command_trains(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND.format(root=str(ROOT)))
    done = april("train", recipe(tmp_path, 'command = ["python", "agent.py"]\nconcurrency = 2', 1, 1), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any("at work" in json.dumps(row, default=str) for row in responses(tmp_path / "run"))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ('command = ["a"]\nurl = "http://x"', "environment.url is set beside environment.command"),
        ('url = "x"', "must be an address with http"),
        ('function = "nowhere.py:play"', "environment.function = "),
        ('command = ["no/such/program"]', "there is no program 'no/such/program'"),
        ('command = ["a"]\nrecovery = "snapshot"', 'a program is recovered by "replay" or "restart"'),
        ('command = ["a"]\nparams = { x = 1 }', "a command and a function have none"),
        ('command = ["a"]\n[gateway]\nport = 99999', "gateway.port = 99999: must be a port"),
        ('command = ["a"]\n[gateway]\nmodels = []', "gateway.models: name at least one model"),
        ('command = ["a"]\n[cluster]\naddress = "auto"\nenvironments = "nodes"', "programs run beside the trainer"),
        ('path = "x:Y"\nscore = "x:Y"', "environment.score rewards programs"),
        ('function = "x:y"\nimage = "python:3.12"', "environment.image is a container for environment.command"),
        ('command = ["a"]\ncontainer_engine = "docker"', "environment.container_engine needs environment.image"),
        ('path = "verifiers:x"', 'task.kind = "reasoning_gym": environment.path = \'verifiers:x\' needs "verifiers"'),
        ('path = "nemo-gym:x"', 'task.kind = "reasoning_gym": environment.path = \'nemo-gym:x\' needs "nemo_gym"'),
        ('path = "nemo-gym:x"', "must be nemo-gym: and an address with http"),
        ('path = "verifiers:x"\nworkers = 0', "environment.workers = 0: verifiers environments have worker processes"),
        ('command = ["a"]\n[gateway]\nsampling = "both"', "sampling"),
        ('path = "x:Y"\n[gateway]\nport = 1', "gateway is set, but no program uses it"),
    ],
)
def test_wrong_settings_are_named(program: str, message: str, tmp_path: Path) -> None:
    text = recipe(tmp_path, "PROGRAM").read_text()
    own, _, section = program.partition("\n[")
    text = text.replace("PROGRAM", own) + (f"[{section}\n" if section else "")
    (tmp_path / "recipe.toml").write_text(text)
    done = april("train", tmp_path / "recipe.toml")
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
