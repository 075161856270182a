"""The time limit of each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG

HANGING = """
import threading

def test_hanging():
    threading.Event().wait()
"""


def test_a_test_that_hangs_ends_with_its_stack(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) == 2 * HANG
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", str(pytestconfig.inipath), "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "-o", "faulthandler_timeout=0.5", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert ended.returncode == 1
    assert "in test_hanging" in ended.stdout + ended.stderr
