"""Recipes of the page "One machine with GPUs" fit the GPUs that they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from april.commands.main import run

PAGE = (Path(__file__).parents[1] / "docs" / "gpus.md").read_text()
RECIPES = re.findall(r"```toml\n# (\d+) GPUs? of (\d+) GB\n(.*?)```", PAGE, re.DOTALL)


def variants() -> list[tuple[str, str, str]]:
    """The first recipe with the settings that the page's table gives for other GPUs."""
    table = re.search(r"^\| GPU \|(.*)\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.MULTILINE)
    assert table
    names = [re.sub(r".*\.|`| ", "", name) for name in table[1].split("|")]
    found = []
    for row in table[2].splitlines():
        size, *values = (cell.strip(" `") for cell in row.strip("|").split("|"))
        recipe = RECIPES[0][2]
        for name, value in zip(names, values, strict=True):
            old = r'^path = "Qwen/.*"$' if name == "path" else rf"^{name} = \d+$"
            new = f'path = "{value}"' if name == "path" else f"{name} = {value}"
            recipe, count = re.subn(old, new, recipe, flags=re.MULTILINE)
            assert count == 1, name
        found.append(("1", size.removesuffix(" GB"), recipe))
    return found


ALL = [*RECIPES, *variants()]


def test_every_recipe_of_the_page_names_its_gpus() -> None:
    assert len(RECIPES) == PAGE.count("```toml")
    assert sorted(int(memory) for _, memory, _ in ALL) == [24, 48, 80, 80, 80, 192]


@pytest.mark.parametrize(("gpus", "memory", "recipe"), ALL, ids=[f"{gpus}x{size}" for gpus, size, _ in ALL])
def test_april_memory_accepts_a_recipe_of_the_page(
    gpus: str, memory: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe)
    assert run(["check", str(tmp_path / "recipe.toml"), "--gpus", gpus, "--gpu-memory", memory]) == 0
    assert run(["memory", str(tmp_path / "recipe.toml"), "--gpu-memory", memory]) == 0
    planned = capsys.readouterr().out
    assert planned.count(": fits") == 2 * 3
    assert "unused" not in planned
