"""Real runs in which an update is not finite: one reward of 1e39 is infinite in float32."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from april.reporting.metrics_log import read_metrics
from tests import tiny
from tests.commands.conftest import status

SMALL = {
    "task": 'reward = "enormous_rewards:score"\n',
    "rollout": "reward_workers = 0\nreward_timeout = 60.0\n",
    "training": "save_interval = 1\neval_interval = 0\n",
}


class Enormous:
    """Every `period`-th reward is 1e39; the others are 0 and 1."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.calls = 0

    def score(self, response: str, answer: str) -> float:
        self.calls += 1
        return 1e39 if self.period and self.calls % self.period == 0 else float(self.calls % 2)


@pytest.fixture
def enormous(monkeypatch: pytest.MonkeyPatch) -> Enormous:
    rewards = Enormous(4)
    module = types.ModuleType("enormous_rewards")
    module.score = rewards.score  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "enormous_rewards", module)
    threads = torch.get_num_threads()
    yield rewards
    torch.set_num_threads(threads)


def skipped(run: Path) -> dict[int, float | None]:
    return {record["step"]: record.get("skipped_updates") for record in read_metrics(run) if record["step"]}


def test_a_skipped_update_is_counted_and_the_run_continues_and_resumes(tmp_path: Path, enormous: Enormous) -> None:
    recipe, run = tiny.recipe(tmp_path, **SMALL), tmp_path / "run"
    assert status("train", str(recipe), "--steps", "2", "--max-skipped-updates", "100") == 0
    assert skipped(run) == {1: 1, 2: 1}
    enormous.period = 0
    assert status("resume", str(run), "--steps", "6") == 0
    found = skipped(run)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] == 0
    records = read_metrics(run)
    assert [record["grad_norm"] is None for record in records if record["step"]] == [bool(n) for n in found.values()]
    summary = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["skipped_updates"] == sum(found.values())
    assert "updates skipped" in (run / "report.html").read_text()


def test_too_many_skipped_updates_end_the_run_and_rewind_repeats_them(
    tmp_path: Path, enormous: Enormous, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = tiny.recipe(tmp_path, **SMALL), tmp_path / "run"
    for command in (["train", str(recipe), "--max-skipped-updates", "2"], ["resume", str(run)]):
        assert status(*command) == 1
        error = capsys.readouterr().err
        assert "2 updates in a row had no finite loss and gradient" in error
        assert f"april resume {run}" in error
    enormous.period = 0
    assert status("resume", str(run), "--rewind", "--steps", "5", "--max-skipped-updates", "5") == 0
    assert skipped(run)[5] == 0
