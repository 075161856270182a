"""The peak memory of ranks is the one that `april memory` reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.launch import run


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("model", {}),
        ("model", {"tensor": 2, "tensor_parallel": 2}),
        ("model", {"context": 2, "context_parallel": 2}),
        ("mixture", {"expert": 2, "expert_parallel": 2}),
    ],
)
def test_the_peak_of_a_rank_is_the_planned_memory(policy: str, layout: dict[str, int], tmp_path: Path) -> None:
    where = str(tmp_path / "policy")
    for said in run("tests.ranks.memory:peaks", 2, tmp_path, directory=where, policy=policy, **layout):
        found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert 0.8 < found["held"] / found["planned"] < 1.1, found
