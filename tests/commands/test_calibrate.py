"""`april calibrate`, on the embedded engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from april.simulation.cost_model import CostModel
from tests.commands.conftest import status

April = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "."), "is a directory; name a file"),
        (("--output", "recipe.toml/x.json"), "nothing can be written to"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
        (
            ("--engine", "vllm", "--server-args=-sc"),
            "server_args names -sc: how many drafted tokens are accepted",
        ),
    ],
)
def test_invalid_options_are_refused_before_a_measurement(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str], message: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert status("calibrate", "recipe.toml", *options) == 2
    assert message in capsys.readouterr().err


def test_calibrate_writes_a_cost_model_of_the_embedded_engine(recipe: Path, april: April) -> None:
    flags = ("--max-num-seqs", "4", "--repeats", "1", "--longest", "64")
    done = april("calibrate", "recipe.toml", *flags)
    assert done.returncode == 0, done.stderr
    cost = CostModel.load(recipe.parent / "cost_model.json")
    assert cost.slots == 4
    assert cost.decode_batches == (1, 2, 4)
    assert cost.source.startswith("measured: embedded")
    assert "written: cost_model.json" in done.stdout
