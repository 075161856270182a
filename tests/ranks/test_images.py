"""Two ranks make of prompts with images what one process makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import vision
from tests.ranks.launch import run


@pytest.mark.parametrize(
    ("architecture", "cases", "checkpointing"),
    [("Qwen3VL", ["grpo", "ppo", "reference", "lora"], False), ("Qwen2_5_VL", ["grpo", "lora"], True)],
)
def test_two_ranks_make_the_updates_of_one_process(
    architecture: str, cases: list[str], checkpointing: bool, tmp_path: Path
) -> None:
    for number, size in enumerate([(40, 24), (24, 16), (16, 16)]):
        vision.picture(tmp_path / f"{number}.png", size, mark=number)
    arguments = {"directory": str(tmp_path), "cases": cases, "architecture": architecture}
    for said in run("tests.ranks.images:compare", 2, tmp_path, 300, checkpointing=checkpointing, **arguments):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said
