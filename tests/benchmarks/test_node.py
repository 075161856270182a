"""The check of a node, on the CPU: processes of its own play the ranks, and commands play the user's scripts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import node
from node_parts import collective, ipc, scripts
from node_parts.given import Given

GIVEN = Given(
    device="cpu",
    tiny=True,
    engine="vllm",
    server_python=sys.executable,
    server_arguments="",
    commands={"synchronous": "echo step 1: 3.5 tokens/s; echo step 2: 4.5 tokens/s"},
    metric="([0-9.]+) tokens/s",
    run_seconds=30.0,
    slower=3.0,
)


def test_all_ranks_receive_the_buckets() -> None:
    found = dict(collective.measure(GIVEN))
    assert found["failures"] == []
    assert found["ranks"] == 2
    assert found["gigabytes_per_second"]["runs"] == collective.ROUNDS - 1


def test_two_processes_share_a_tensor() -> None:
    found = dict(ipc.measure(GIVEN))
    assert found["failures"] == []
    assert found["bytes"] == 1 << 20


def test_figures_are_read_from_the_output_of_a_script() -> None:
    found = dict(scripts.synchronous(GIVEN))
    assert found["values"] == [3.5, 4.5]
    assert found["median"] == 4
    assert found["ended_by"] == "itself, with exit status 0"
    assert found["failures"] == []


def test_a_script_that_fails_is_a_failure_and_its_secrets_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    given = Given(**{**vars_of(GIVEN), "commands": {"april": "echo no access for $WANDB_API_KEY; exit 3"}})
    found = dict(scripts.with_april(given))
    assert found["failures"][0] == "exit status 3"
    assert "no access for" in found["tail"][0]
    assert "0123456789abcdef" not in json.dumps(found)


def test_a_script_is_ended_at_its_time_limit() -> None:
    command = shlex.join([sys.executable, "-S", "-c", "import time; print('9 tokens/s', flush=True); time.sleep(60)"])
    given = Given(**{**vars_of(GIVEN), "commands": {"own-partial": command}, "run_seconds": 3.0})
    found = dict(scripts.own_partial(given))
    assert found["ended_by"] == "the time limit"
    assert found["failures"] == []


def test_parts_with_missing_requirements_are_skipped_by_name(tmp_path: Path) -> None:
    output = tmp_path / "node.json"
    parts = ["sleep", "kill", "synchronous", "own-partial", "april"]
    assert node.main(["--device", "cpu", "--tiny", "--output", str(output), "--parts", *parts]) == 0
    found = json.loads(output.read_text())["parts"]
    assert {part["state"] for part in found.values()} == {"skipped"}
    assert found["kill"]["reason"] == "no servers: name --server-python"
    assert found["own-partial"]["reason"] == "no command: name yours with --own-partial"


def vars_of(given: Given) -> dict[str, object]:
    return {name: getattr(given, name) for name in given.__dataclass_fields__}
