"""Environments of the real package verifiers play through the gateway (`make test-verifiers`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest

from april.gateway import containers
from april.gateway.agent import ProgramAgents
from april.gateway.verifiers_config import environment_config
from april.gateway.verifiers_program import VerifiersProgram
from april.reporting.metrics_log import read_metrics
from april.rollout.episodes.environment import EnvironmentLost, Unrewarded
from april.rollout.episodes.turns import AgentStart
from april.tasks.build import build_task
from april.tasks.task import TaskSpec
from tests.forked import run as april
from tests.forked import start, wait_until
from tests.gateway.scripted import ScriptedPolicy, call, served, until

pytest.importorskip("verifiers")

ROOT = Path(__file__).parents[2]
WORDS, TOOL = (f"verifiers:{ROOT}/tests/gateway/verifiers_sets/april_gcd_{name}.py" for name in ("words", "tool"))
NULL = {"agent": {"harness": {"id": "null"}}}
RECIPE = """
[model]
path = "{root}/examples/gcd_tool/model"
[environment]
path = "{path}"
max_turns = 12
workers = 1
concurrency = 12
[task]
kind = "verifiers"
eval_size = 1
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 6
n_samples_per_prompt = 2
max_staleness = 2
max_response_length = 512
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
save_interval = 1
threads = 1
[reporting]
output = "{output}"
trackers = []
"""


def recipe(tmp_path: Path, path: str, steps: int = 2) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(root=ROOT, path=path, steps=steps, output=tmp_path / "run"))
    return file


def problems(path: str, **settings):
    return build_task(TaskSpec("verifiers", name=path, **settings))


def started(path: str, index: int = 0, key: str = "0.0") -> AgentStart:
    return AgentStart(key, {"id": "p", **problems(path, eval_size=0).problem(index).metadata}, 7)


async def played(path: str, script, params=None):
    program = VerifiersProgram(path, params or {}, 8, 1, 4)
    async with served(ScriptedPolicy(script)) as (gateway, _):
        try:
            return await ProgramAgents(program, gateway).run(started(path))
        finally:
            await program.close()


def test_problems_are_the_tasks_and_their_positions_stay():
    task, again = problems(WORDS, eval_size=4), problems(WORDS, eval_size=4)
    assert (len(task), task.eval_size) == (32, 4)
    assert [task.problem(i) for i in range(32)] == [again.problem(i) for i in range(32)]
    pairs = {(p["a"], p["b"]) for p in (task.problem(i).metadata["task"] for i in range(32))}
    held_out = {(p["a"], p["b"]) for p in (task.problem(i, "eval").metadata["task"] for i in range(4))}
    assert len(pairs | held_out) == 36
    assert problems(WORDS, eval_size=4, size=3).problem(2) == task.problem(2)


async def test_one_turn_is_rewarded_by_the_rubric():
    outcome = await played(WORDS, ["It is 2"])
    assert outcome.reward == 1.0
    assert outcome.info == {"length": 7.0, "reward/right": 1.0, "stop_condition": "agent_completed"}


async def test_turns_with_tools_of_a_tool_server():
    assert shutil.which("uv"), "harnesses of verifiers are scripts of uv"
    script = [call("subtract", '{"a": 4, "b": 2}'), "<answer>2</answer>"]
    outcome = await played(TOOL, script, NULL)
    assert (outcome.reward, outcome.info["calls"]) == (1.0, 1.0)


async def test_the_limit_of_turns_ends_an_episode_with_its_reward():
    program = VerifiersProgram(TOOL, NULL, 1, 1, 4)
    async with served(ScriptedPolicy([call("subtract", '{"a": 4, "b": 2}')] * 3)) as (gateway, _):
        outcome = await ProgramAgents(program, gateway).run(started(TOOL))
        await program.close()
    assert (outcome.reward, outcome.info["stop_condition"]) == (0.0, "max_turns")


async def test_a_rubric_that_raises_is_named(monkeypatch):
    monkeypatch.setenv("FAULT", "raise")
    with pytest.raises(Unrewarded, match="TaskError: task Words scoring: KeyError: 'the rubric fails'"):
        await played(WORDS, ["It is 2"])


async def test_a_rubric_that_takes_too_long_leaves_no_reward(monkeypatch):
    monkeypatch.setenv("FAULT", "wait")
    with pytest.raises(Unrewarded, match="the reward right was not computed: scoring_timeout"):
        await played(WORDS, ["It is 2"], {"agent": {"timeout": {"scoring": 0.2}}})


async def test_a_late_request_reaches_no_other_episode(monkeypatch):
    from verifiers.v1.clients import EvalClientConfig
    from verifiers.v1.dialects.anthropic import AnthropicDialect
    from verifiers.v1.errors import ProviderError

    from april.gateway import verifiers_player as player

    dialect, sent = AnthropicDialect(), []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(str(request.url))
        return httpx.Response(200, json={"input_tokens": 3})

    client = player.PolicyClient(EvalClientConfig(base_url=player.POLICY, api_key_var="APRIL_NO_KEY"))
    client.client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(player, "ADDRESSES", {"other": "http://other"})
    with pytest.raises(ProviderError, match="the episode has ended") as refused:
        await client.relay(dialect, {}, "ended")
    assert (refused.value.status_code, sent) == (410, [])
    await client.relay(dialect, {}, "other")
    assert await client.relay_aux(dialect, "/v1/messages/count_tokens", {}, {"X-Session-ID": "its own"})
    assert all(url.startswith("http://other/v1/messages") for url in sent)
    assert len(sent) == 2
    player.ADDRESSES.clear()
    with pytest.raises(ProviderError, match="the episode has ended"):
        await client.relay_aux(dialect, "/v1/messages/count_tokens", {})


async def test_an_episode_that_is_cancelled_ends_alone(monkeypatch):
    monkeypatch.setenv("FAULT", "wait")
    program = VerifiersProgram(WORDS, {}, 8, 1, 4)
    async with served(ScriptedPolicy(["It is 2"] * 2)) as (gateway, _):
        agents = ProgramAgents(program, gateway)
        both = [asyncio.create_task(agents.run(started(WORDS, 0, f"0.{index}"))) for index in range(2)]
        await until(lambda: len(gateway.policy.histories) == 2, *both)
        both[0].cancel()
        await asyncio.wait({both[0]})
        assert both[0].cancelled()
        await asyncio.sleep(0.5)
        assert not both[1].done()
        [worker] = program._workers
        assert worker.alive
        await program.close()
        with pytest.raises(EnvironmentLost):
            await both[1]


async def test_a_rubric_that_blocks_costs_its_process(monkeypatch):
    monkeypatch.setenv("FAULT", "hang")
    monkeypatch.setattr("april.gateway.verifiers_program.GRACE", 1.0)
    program = VerifiersProgram(WORDS, {}, 8, 1, 4)
    async with served(ScriptedPolicy(["It is 2"] * 2)) as (gateway, _):
        agents = ProgramAgents(program, gateway)
        both = [asyncio.create_task(agents.run(started(WORDS, 0, f"0.{index}"))) for index in range(2)]
        await until(lambda: gateway.policy.histories, *both)
        await asyncio.sleep(1.0)
        both[0].cancel()
        with pytest.raises(EnvironmentLost) as lost:
            await both[1]
        assert not lost.value.own
        await program.close()


@pytest.mark.parametrize(
    ("path", "params", "message"),
    [
        ("verifiers:no_such_set", {}, "taskset 'no_such_set' not found"),
        (WORDS, {"agent": {"harness": {"id": "no_such"}}}, "harness 'no_such' not found"),
        (WORDS, {"agnt": {}}, "agnt"),
        (WORDS, {"taskset": {"wrong": 1}}, "wrong"),
        (WORDS, {"agent": {"harness": {"id": "mini_swe_agent"}}}, "harness 'mini_swe_agent' needs a container engine"),
        (WORDS, {"agent": {"runtime": {"type": "podman"}}}, "needs podman, which this machine cannot use"),
        (
            WORDS,
            {"agent": {"harness": {"id": "codex"}, "runtime": {"type": "subprocess"}}},
            "harness 'codex' needs a container: remove agent.runtime",
        ),
    ],
)
def test_what_cannot_be_played_is_named_before_the_run(path, params, message, monkeypatch):
    monkeypatch.setattr(containers, "engine_fault", lambda name: containers.ABSENT)
    monkeypatch.setattr("april.gateway.verifiers_config.engine_fault", lambda name: containers.ABSENT)
    with pytest.raises(ValueError, match=r"environment\.path = ") as wrong:
        environment_config(path, params, 8)
    assert message in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_harnesses_that_need_no_container_are_those_of_the_guide():
    from verifiers.v1.utils.loaders import builtin_harness_ids, harness_class

    without = [name for name in builtin_harness_ids() if name != "utils" and _needs_none(harness_class, name)]
    assert without == ["bash", "null"]


def _needs_none(harness_class, name: str) -> bool:
    try:
        return not harness_class(name).NEEDS_CONTAINER
    except AttributeError:  # a module of helpers, and no harness
        return False


@pytest.mark.slow
def test_training_interrupts_turns_with_tools(tmp_path):
    done = april("train", recipe(tmp_path, TOOL))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    steps = [line for line in read_metrics(tmp_path / "run") if "samples_resumed" in line]
    assert len(steps) == 2
    assert sum(line["samples_resumed"] for line in steps) > 0
    assert {line["environment_failures"] for line in steps} == {0}
    assert {line["sequences_per_episode"] for line in steps} == {1.0}
    assert max(line["turns_max"] for line in steps) > 2
    assert all(line["reward/calls"] > 0 for line in steps)


@pytest.mark.slow
def test_a_killed_run_replays_its_episodes(tmp_path):
    file, output = recipe(tmp_path, TOOL, steps=3), tmp_path / "run"
    run = start("train", file)
    wait_until(lambda: any("samples_resumed" in line for line in _read(output)), run)
    time.sleep(2.0)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    done = april("resume", output)
    assert done.returncode == 0, done.stderr
    steps = [line for line in read_metrics(output) if "samples_resumed" in line]
    assert len(steps) == 3
    assert {line["environment_failures"] for line in steps} == {0}
    assert sum(line["episodes_restarted"] for line in steps) == 0


def _read(output: Path) -> list[dict]:
    try:
        return read_metrics(output)
    except FileNotFoundError:
        return []
