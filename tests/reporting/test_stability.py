from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from april.reporting.faults import described, read_faults
from april.reporting.run_log import RunLog
from april.reporting.stability import LEAST_ESS, MOST_KL, StabilityWatch
from tests.reporting.test_run_log import rollout

STUDY = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "remedies.jsonl"


def warned(steps: list[dict[str, float]]) -> list[int]:
    """The steps after which a watch has something to say, counted from 1."""
    watch = StabilityWatch()
    return [number for number, record in enumerate(steps, 1) if watch.observe(record)]


def test_it_warns_once_until_it_has_been_well_again() -> None:
    bad, good = {"ess": LEAST_ESS - 0.1, "kl_behaviour": 2 * MOST_KL}, {"ess": 1.0, "kl_behaviour": 0.0}
    assert warned([bad] * 10) == [3]
    assert warned([bad] * 5 + [good] * 3 + [bad] * 3) == [3, 10]
    assert warned([bad, bad]) == []


@pytest.mark.parametrize(
    "only", [{"ess": 0.1, "kl_behaviour": 0.0}, {"ess": 1.0, "kl_behaviour": 1.0}, {"ess": 0.1}, {}]
)
def test_one_sign_alone_is_no_reason(only: dict[str, float]) -> None:
    assert warned([only] * 9) == []


def test_the_thresholds_tell_the_study_s_rates_apart() -> None:
    """At three times the best rate it warns in every run with partial rollouts, at the best rate in none."""
    runs = [json.loads(line) for line in STUDY.read_text().splitlines()]

    def share(rate: float) -> float:
        logs = [run["by_step"] for run in runs if (run["arm"], run["rate"]) == ("partial", rate)]
        names = ("ess", "kl_behaviour")
        found = [
            warned([dict(zip(names, v, strict=True)) for v in zip(*map(log.get, names), strict=True)]) for log in logs
        ]
        assert len(found) >= 8
        return sum(map(bool, found)) / len(found)

    assert share(1.7e-4) == 0
    assert share(5.1e-4) == 1


def test_the_run_log_keeps_the_warning(tmp_path: Path) -> None:
    said: list[str] = []

    class Noted:
        note = staticmethod(said.append)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    with RunLog(tmp_path, {}, progress=Noted()) as log:  # type: ignore[arg-type]
        for number in (1, 2, 3):
            log.step(rollout(number), {"ess": 0.5, "kl_behaviour": 0.01, "grad_norm": 2.0}, slots=4)
    (record,) = read_faults(tmp_path)
    assert record["step"] == 3
    ((what, why),) = described(record)
    assert what == "warning"
    assert "effective sample size is 0.50" in why
    assert said == [f"warning: {why}"]
