"""All ranks are restarted after the loss of one, and no rank waits without end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from april.config.recipe import Recipe
from april.training import rank_group, rank_launcher
from april.training.rank_supervisor import RankSupervisor
from tests.ranks.launch import ROOT


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ranks by a plan, a line for each of their lives; returns the exit status."""
    monkeypatch.setattr(rank_launcher, "COMMAND", [sys.executable, "-m", "tests.ranks.stub"])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    recipe = Recipe()
    recipe.reporting.output = str(tmp_path)
    recipe.trainer.processes, recipe.trainer.rank_timeout = 2, 300.0

    def run(*plan: list[str | int], **settings: Any) -> int:
        for name, value in settings.items():
            setattr(recipe.trainer, name, value)
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        # Only a waiting rank has to be ended, after this time; a rank that ends by itself has the time that it needs.
        waiting = {"waits", "stopped"} & {part for life in plan for part in life}
        monkeypatch.setattr(rank_group, "GRACE_SECONDS", 1.0 if waiting else 120.0)
        return RankSupervisor(recipe).run()

    run.recipe = recipe
    return run


def told(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "told.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_rank_0_determines_how_the_run_ends(ends: Any, status: int, tmp_path: Path) -> None:
    assert ends([status, "lost"]) == status
    assert len(told(tmp_path)) == 2


def test_other_ranks_may_end_before_rank_0(ends: Any, tmp_path: Path) -> None:
    assert ends([0, "done"]) == 0
    assert len(told(tmp_path)) == 2


@pytest.mark.parametrize("plan", [["waits", "killed"], ["killed", "waits"], ["lost", "killed"]])
def test_a_killed_rank_is_named_and_all_ranks_restart(
    ends: Any, plan: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends(plan, [0, "done"]) == 0
    assert f"rank {plan.index('killed')} was ended by SIGKILL; all ranks restart" in capfd.readouterr().err


def test_rollouts_of_rank_0_survive_the_loss_of_another_rank(ends: Any, tmp_path: Path) -> None:
    assert ends(["collects", "killed while it collects"], [0, "done"]) == 0
    assert (tmp_path / "collected").exists()


def test_a_rank_that_hangs_is_named_and_ended(ends: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert ends(["waits", "stopped"], [0, "done"], rank_timeout=8.0) == 0
    said = capfd.readouterr().err
    assert "rank 1 sent no heartbeat for " in said
    assert "rank 0" not in said


def test_a_memory_shortage_of_a_rank_reduces_micro_batches(
    ends: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends(["lost", "memory"], [0, "done"]) == 0
    assert "rank 1 ran out of memory; micro-batches have 4096 tokens after the restart" in capfd.readouterr().err
    assert [line["max_tokens_per_micro_batch"] for line in told(tmp_path)] == [8192, 8192, 4096, 4096]


def test_a_memory_shortage_outside_training_counts_as_a_lost_rank(
    ends: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends(*[["lost", "starved"]] * 2, max_restarts=1) == 1
    said = capfd.readouterr().err
    assert "rank 1 ran out of memory: no room for a checkpoint; all ranks restart" in said
    assert "rank 1 ran out of memory: no room for a checkpoint; the ranks are not restarted" in said
    assert [line["max_tokens_per_micro_batch"] for line in told(tmp_path)] == [8192] * 4


def test_smaller_micro_batches_do_not_count_as_losses(ends: Any, tmp_path: Path) -> None:
    assert ends(*[["lost", "memory"]] * 3, ["lost", "killed"], [0, "done"], max_restarts=1) == 0
    assert [line["max_tokens_per_micro_batch"] for line in told(tmp_path)][::2] == [8192, 4096, 2048, 1024, 1024]


def test_a_failure_that_no_restart_fixes_ends_the_run(ends: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert ends(["lost", "failed"]) == 1
    assert "rank 1: OSError: the disk is full" in capfd.readouterr().err


def test_restarts_of_ranks_are_limited(ends: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ends(*[["waits", "killed"]] * 3, max_restarts=2) == 1
    assert "rank 1 was ended by SIGKILL; the ranks are not restarted" in capfd.readouterr().err
    assert len(told(tmp_path)) == 6


def test_a_step_between_two_losses_resets_the_count(ends: Any, tmp_path: Path) -> None:
    assert ends(*[["trains", "killed"]] * 3, [0, "done"], max_restarts=1) == 0
    assert len(told(tmp_path)) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name")
@pytest.mark.parametrize(("address", "interface"), [("", "lo"), ("127.0.0.1:6379", None)])
def test_ranks_keep_to_this_machine_unless_engines_are_elsewhere(
    ends: Any, address: str, interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ends.recipe.cluster.address = address
    assert ends([0, "done"]) == 0
    assert [line["interface"] for line in told(tmp_path)] == [interface] * 2


def test_a_started_run_is_resumed(ends: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    assert ends(["waits", "killed"], [0, "done"]) == 0
    assert [line["resume"] for line in told(tmp_path)] == [False, False, True, True]
