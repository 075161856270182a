from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from april.simulation.model_shape import shape_of
from april.simulation.recorded import read_recorded
from april.simulation.workload import WORKLOADS, Workload
from tests import tiny


def record(run: Path, lengths: np.ndarray, budget: int) -> Path:
    """A run whose every step trained on the groups of one row, shape [steps, N, G]."""
    run.mkdir()
    rollout = {"n_samples_per_prompt": lengths.shape[2], "max_response_length": budget, "rollout_batch_size": 1}
    (run / "recipe.json").write_text(json.dumps({"rollout": rollout}))
    steps = (
        {"step": i, "lengths": row.ravel().tolist(), "truncated": (row.ravel() >= budget).tolist()}
        for i, row in enumerate(lengths, 1)
    )
    (run / "trace.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


@pytest.mark.parametrize("name", ["lognormal", "bimodal", "group-correlated"])
def test_distribution_and_correlation_are_recovered_from_a_run(tmp_path: Path, name: str) -> None:
    true = WORKLOADS[name]
    seeds = np.arange(8 * 400, dtype=np.uint64)
    lengths = true.lengths(np.repeat(np.arange(400), 8), seeds).reshape(20, 20, 8)
    found = read_recorded(record(tmp_path / "run", lengths, true.max_tokens)).workload
    shares = [0.1, 0.5, 0.9, 0.99]
    expected, drawn = (np.quantile(workload.sample(20_000), shares) for workload in (true, found))
    assert drawn == pytest.approx(expected, rel=0.25)
    assert found.correlation == pytest.approx(true.correlation, abs=0.08)


def test_truncated_lengths_are_reported(tmp_path: Path) -> None:
    found = read_recorded(record(tmp_path / "run", np.array([[[64, 64], [10, 64]]]), 64))
    assert found.truncated == 0.75
    assert found.train_token_seconds is None
    assert found.workload.sample(1000).max() <= 64


def test_a_workload_is_a_mixture_or_observed() -> None:
    for wrong in ({}, {"parts": WORKLOADS["light"].parts, "observed": (1, 2)}):
        settings: dict[str, Any] = wrong
        with pytest.raises(ValueError, match="parts or observed lengths"):
            Workload("neither", **settings)


def test_the_shape_of_the_recipes_own_model(tmp_path: Path) -> None:
    shape = shape_of(str(tiny.save(tmp_path / "model")))
    assert (shape.name, shape.layers, shape.kv_heads, shape.head_dim) == ("model", 2, 2, 8)
    assert shape.parameters == shape.matrix_parameters == 2 * (32 * 8 * 12 + 3 * 32 * 64) + 32 * 101
    assert shape_of("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B").name == "r1-distill-1.5b"
    with pytest.raises(ValueError, match="the shape of this model is not known"):
        shape_of("someone/else")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    with pytest.raises(ValueError, match="mixtures of experts"):
        shape_of(str(tmp_path / "model"))
    tiny.mixture().save_pretrained(tmp_path / "mixture")
    mixture = shape_of(str(tmp_path / "mixture"))
    assert (mixture.intermediate, mixture.experts, mixture.experts_per_token) == (16, 4, 2)
    assert mixture.parameters == 2 * (32 * 8 * 12 + 4 * 3 * 32 * 16) + 32 * 101
