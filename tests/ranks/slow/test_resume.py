"""`april resume DIR --processes K`: a run resumes with a different number of ranks, and without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limits import HANG
from tests.ranks.runs import april, recipe_in, trained


def test_a_run_resumes_with_a_different_number_of_processes(tmp_path: Path) -> None:
    straight = april("train", recipe_in(tmp_path, "straight"))
    run = tmp_path / "run"
    for arguments in (
        ("train", recipe_in(tmp_path, "run"), "--steps", 1),
        ("resume", run, "--processes", 1, "--steps", 2),
        ("resume", run, "--processes", 3, "--steps", 3),
        ("resume", run, "--processes", 2, "--steps", 4),
    ):
        process = april(*arguments)
        said, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0, said
    said, _ = straight.communicate(timeout=HANG)
    assert straight.returncode == 0, said
    for found, expected in zip(trained(run), trained(tmp_path / "straight"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
