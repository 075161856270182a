"""A rank that dies while a checkpoint is written, in the middle of a file or before the last rename."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.training.checkpoint import checkpoints
from tests.limits import HANG
from tests.ranks.runs import april, recipe_in, trained

DIES = """
import os, pathlib, signal

MARK = pathlib.Path({mark!r})


def die():
    left = sorted(path.name for path in pathlib.Path({run!r}, "checkpoints").iterdir())
    MARK.write_text(" ".join(left))
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function, when):
    def call(*arguments):
        if os.environ.get("RANK") == {rank!r} and not MARK.exists() and when(*arguments):
            die()
        return function(*arguments)

    return call


pathlib.Path.rename = dying(pathlib.Path.rename, lambda path, to: {rank!r} == "0" and to.name == "step-000002")
os.pwrite = dying(
    os.pwrite, lambda file, data, at: {rank!r} == "1" and ".step-000002." in os.readlink(f"/proc/self/fd/{{file}}")
)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_checkpoint_is_complete_or_absent(rank: str, tmp_path: Path) -> None:
    settings = ("--save-interval", 1, "--steps", 3)
    calm = april("train", recipe_in(tmp_path, "calm"), *settings)
    run, mark = tmp_path / "run", tmp_path / "died"
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(DIES.format(mark=str(mark), run=str(run), rank=rank))
    said, _ = calm.communicate(timeout=HANG)
    assert calm.returncode == 0, said
    disturbed = april("train", recipe_in(tmp_path, "run"), *settings, modules=modules)
    said, _ = disturbed.communicate(timeout=HANG)
    assert disturbed.returncode == 0, said
    assert mark.read_text() == ".step-000002.partial step-000001"
    assert f"rank {rank} was ended by SIGKILL; all ranks restart" in said
    for found, expected in zip(trained(run), trained(tmp_path / "calm"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)  # results after a restart are rounded differently
    assert [path.name for path in checkpoints(run / "checkpoints")] == [
        path.name for path in checkpoints(tmp_path / "calm" / "checkpoints")
    ]
    assert not list((run / "checkpoints").glob(".*"))
