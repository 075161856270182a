"""What a process that torchrun started does by its environment, before it meets the others and when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from april.commands import rank, resume
from april.commands.start import check_ranks
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training import distributed
from april.training.rank_protocol import EXIT_RANK_LOST, RankLostError, StatusReporter
from april.training.resume import began_here, note_beginning, saved_recipe
from april.training.sharded import MemoryShortage
from tests import tiny
from tests.commands.conftest import status


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a rank of a job."""

    def started(number: int = 0, world: int = 1, job: str = "first", restarts: int = 3) -> None:
        names = {"RANK": number, "WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_MAX_RESTARTS": restarts}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))

    return started


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repairs with which runs are resumed, which are not done."""
    repairs: list[str] = []
    monkeypatch.setattr(resume, "check_run", lambda run, repair: repairs.append(repair) or [])
    monkeypatch.setattr(resume, "start", lambda recipe, resume: 0)
    return repairs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has begun, without torchrun."""
    assert status("train", str(tiny.recipe(tmp_path)), "--steps", "1", "--eval-interval", "0") == 0
    return tmp_path / "run"


@pytest.mark.parametrize(("processes", "world"), [(1, 2), (3, 2), (2, 1)])
def test_the_number_of_processes_must_match_the_recipe(
    torchrun: Any, processes: int, world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun(0, world)
    assert status("train", str(tiny.recipe(tmp_path)), "--processes", str(processes)) == 2
    assert f"trainer.processes = {processes}, but torchrun started {world} processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_torchrun_places_ranks_and_no_cluster_does(torchrun: Any) -> None:
    torchrun(0, 2)
    recipe = Recipe()
    recipe.trainer.processes, recipe.cluster.address, recipe.cluster.ranks = 2, "auto", "nodes"
    with pytest.raises(ConfigError, match=r'cluster.ranks = "nodes", but torchrun has started the ranks: remove it'):
        check_ranks(recipe)


def test_a_job_with_restarts_needs_an_id(torchrun: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchrun(job="none")
    assert status("train", str(tiny.recipe(tmp_path))) == 2
    assert "add --rdzv-id ID" in capsys.readouterr().err


def test_only_the_job_that_started_a_run_resumes_it(torchrun: Any, tmp_path: Path) -> None:
    assert not began_here(tmp_path)
    torchrun()
    note_beginning(tmp_path, Recipe())
    assert began_here(tmp_path)
    torchrun(job="second")
    assert not began_here(tmp_path)
    torchrun(job="none")
    assert not began_here(tmp_path)


def test_a_restarted_leader_resumes(torchrun: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchrun()
    train = ("train", str(tiny.recipe(tmp_path)), "--steps", "1", "--eval-interval", "0")
    assert status(*train) == 0
    assert status(*train) == 0
    capsys.readouterr()
    torchrun(job="second")
    assert status(*train) == 2
    assert "there is a run already" in capsys.readouterr().err


def test_only_the_leader_checks_and_repairs_the_run(torchrun: Any, run: Path, checked: list[str]) -> None:
    torchrun(1, 2)
    assert status("resume", str(run), "--rewind", "--processes", "2") == 0
    assert checked == []
    torchrun(0, 2)
    assert status("resume", str(run), "--rewind", "--processes", "2") == 0
    assert checked == ["rewind"]


def test_restarted_ranks_repair_the_journal_only_once(
    torchrun: Any, run: Path, checked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun()
    assert status("resume", str(run), "--rewind") == 0
    assert capsys.readouterr().err == ""
    note_beginning(run, saved_recipe(run))
    assert status("resume", str(run), "--rewind") == 0
    assert checked == ["rewind", "none"]
    assert "--rewind is not done again; if this is another job, give it an id of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryShortage(256, "no memory"), "out of memory; lower training.max_tokens_per_micro_batch (to 256, say)"),
        (MemoryError("std::bad_alloc"), "ran out of memory: std::bad_alloc; unless torchrun restarts all ranks"),
        (RankLostError("Connection closed"), "lost another rank (Connection closed); unless torchrun restarts all"),
    ],
)
def test_without_an_agent_a_failed_rank_prints_a_remedy(
    torchrun: Any, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_: Recipe) -> None:
        raise error

    torchrun(1, 2)
    monkeypatch.setattr(distributed, "run_follower", ends)
    assert rank.train(Recipe(), False, StatusReporter()) == EXIT_RANK_LOST
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"april: rank 1: {said}")
    assert "april resume" in line
