"""Mistakes in a task, as a recipe's reader sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.tasks.build import build_task, in_recipe
from april.tasks.task import TaskSpec


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reward": "nowhere:score"}, "task.reward = 'nowhere:score': there is no module"),
        ({"prompt_column": "ask"}, "task: {path}:1: prompt_column = 'ask': no such column"),
        ({"path": "broken.jsonl"}, "task: broken.jsonl:1: not valid JSON"),
    ],
)
def test_errors_name_the_setting_or_the_file(
    settings: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text("{")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "2 + 2?", "answer": "4"}\n' * 20)
    with pytest.raises(ValueError, match=r".") as found:
        build_task(TaskSpec("records", **{"path": str(data), **settings}))
    assert in_recipe(found.value).startswith(said.format(path=data))
