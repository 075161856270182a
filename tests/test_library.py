"""The program of the page on the library, as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_program_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Responses end at the model's end-of-sequence token, and rewards rise."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 45
    monkeypatch.chdir(ROOT)
    exec(compile(program, "docs/library.md", "exec"), {"__name__": "library"})
    rewards = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rewards) == 6
    assert sum(rewards[3:]) / 3 > rewards[0] + 0.1
