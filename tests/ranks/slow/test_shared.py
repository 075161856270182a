"""A run on two ranks whose engines and trainer use the devices in turn."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from april.reporting.metrics_log import read_metrics
from tests.limits import HANG
from tests.ranks.runs import april, recipe_in


def test_ranks_in_turns_train_what_ranks_do_that_stay_on_the_device(tmp_path: Path) -> None:
    weights = {}
    for layout in ("split", "shared"):
        recipe = recipe_in(tmp_path, layout)
        recipe.write_text(recipe.read_text().replace("[trainer]\n", f'[trainer]\nlayout = "{layout}"\n'))
        process = april("train", recipe)
        said, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0, said
        assert all(row["grad_norm"] > 0 for row in read_metrics(tmp_path / layout) if "loss" in row)
        weights[layout] = load_file(tmp_path / layout / "checkpoints" / "step-000004" / "model.safetensors")
    assert all((tensor == weights["shared"][name]).all() for name, tensor in weights["split"].items())
