"""The library example of the README, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_library_example_runs_and_is_short() -> None:
    example = max(re.findall(r"```python\n(.*?)```", README, re.DOTALL), key=len)
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 30
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    assert len(steps) == 10
    assert all(int(tokens) > 0 and int(staleness) <= 5 for tokens, staleness, _ in steps)
    assert any(float(share) > 0 for _, _, share in steps), "something was interrupted and resumed"
