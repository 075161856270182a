"""`april train` with the embedded engine, whose device the trainer leaves while it generates."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from april.reporting.metrics_log import read_metrics
from tests.forked import run as april
from tests.training.test_trainer import metrics, recipe

__all__ = ["recipe"]


def tensors(run: Path, name: str = "checkpoints/step-000006") -> dict[str, bytes]:
    files = sorted((run / name).rglob("*.safetensors"))
    assert len(files) >= 2
    found = {}
    for file in files:
        for key, tensor in load_file(file).items():
            found[f"{file.name}/{key}"] = tensor.flatten().view(-1).float().numpy().tobytes()
    return found


def test_a_run_in_turns_trains_what_a_run_does_that_stays_on_the_device(recipe: Path, tmp_path: Path) -> None:
    """In bfloat16, with master weights: they leave with the moments, and the engine computes with their copies."""
    for layout in ("split", "shared"):
        flags = ("--layout", layout, "--output", str(tmp_path / layout), "--model.compute-dtype", "bfloat16")
        done = april("train", recipe, *flags)
        assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "shared") == tensors(tmp_path / "split")
    exchanged = {name for row in metrics(tmp_path / "shared") for name in row} - {
        name for row in metrics(tmp_path / "split") for name in row
    }
    rows = [{k: v for k, v in row.items() if k not in exchanged} for row in metrics(tmp_path / "shared")]
    assert rows == metrics(tmp_path / "split")


def test_a_run_in_turns_is_resumed(recipe: Path, tmp_path: Path) -> None:
    flags = ("--layout", "shared", "--output", str(tmp_path / "whole"))
    assert april("train", recipe, *flags).returncode == 0
    flags = ("--layout", "shared", "--output", str(tmp_path / "parts"))
    assert april("train", recipe, *flags, "--steps", "3").returncode == 0
    done = april("resume", tmp_path / "parts", "--steps", "6")
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "parts")[-1]["step"] == 6
    assert tensors(tmp_path / "parts") == tensors(tmp_path / "whole")
