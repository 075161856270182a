"""The command line as a user has it: a process, or a call where a process would only take longer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from april.commands.main import run
from tests import forked, tiny


def status(*arguments: str) -> int:
    """The exit status of `april ARGUMENTS`, in this process."""
    try:
        return run(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.recipe(tmp_path)


@pytest.fixture
def april(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`april ARGUMENTS` in a folder of its own, on a terminal of 100 columns."""

    def process(*arguments: object) -> subprocess.CompletedProcess[str]:
        return forked.run(*arguments, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"})

    return process
