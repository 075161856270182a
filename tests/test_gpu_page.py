"""Recipes of the page "One machine with GPUs" fit the GPUs that they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from april.commands.main import run

PAGE = (Path(__file__).parents[1] / "docs" / "getting-started" / "gpu.md").read_text()
RECIPES = re.findall(r"```toml\n# (\d+) GPUs? of (\d+) GB\n(.*?)```", PAGE, re.DOTALL)


def test_every_recipe_of_the_page_names_its_gpus() -> None:
    assert len(RECIPES) == PAGE.count("```toml")
    assert sorted(int(memory) for _, memory, _ in RECIPES) == [24, 48, 80, 192]


@pytest.mark.parametrize(("gpus", "memory", "recipe"), RECIPES, ids=[f"{gpus}x{size}" for gpus, size, _ in RECIPES])
def test_april_memory_accepts_a_recipe_of_the_page(
    gpus: str, memory: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe)
    assert run(["check", str(tmp_path / "recipe.toml"), "--gpus", gpus, "--gpu-memory", memory]) == 0
    assert run(["memory", str(tmp_path / "recipe.toml"), "--gpu-memory", memory]) == 0
    planned = capsys.readouterr().out
    assert planned.count(": fits") == 2 * 3
    assert "unused" not in planned
