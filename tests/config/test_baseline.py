"""Settings under which a group-relative algorithm would train on nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.problems import problems


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "gspo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("rollout", [{"n_samples_per_prompt": 1}, {"temperature": 0.0}])
def test_a_group_without_differences_is_refused(algorithm: str, rollout: dict[str, Any]) -> None:
    (line,) = problems({"algorithm": {"algorithm": algorithm}, "rollout": rollout})
    assert line.startswith(f"rollout.{next(iter(rollout))} = ")
    assert "choose reinforce_plus_plus or ppo" in line


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "ppo"])
@pytest.mark.parametrize("rollout", [{"n_samples_per_prompt": 1}, {"temperature": 0.0}])
def test_other_baselines_take_single_samples(algorithm: str, rollout: dict[str, Any]) -> None:
    assert problems({"algorithm": {"algorithm": algorithm}, "rollout": rollout}) == []
