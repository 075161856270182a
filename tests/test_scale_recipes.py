"""The recipes of examples/scale fit the GPUs that they are for, by the real shapes of their policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from april.commands.assumed import known_model
from april.commands.main import run
from april.commands.simulate import SimulateOptions, simulation_of
from april.config.reading import load_recipe
from april.training.memory_check import phases
from april.training.memory_plan import plan_memory
from tests import tiny

SCALE = Path(__file__).parent.parent / "examples" / "scale"
GPU = 80e9
SHARE = 0.85
"""Of a GPU's memory: the rest is for kernels and allocators."""
COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[PreTrainedConfig, float]] = {
    "Qwen/Qwen3-8B": (
        Qwen3Config(**COMMON, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8),
        8.19e9,
    ),
    "Qwen/Qwen3-30B-A3B": (
        Qwen3MoeConfig(
            **COMMON,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        30.53e9,
    ),
}
"""As their config.json on the hub has them, and how many parameters their cards name."""


LAYOUTS = [("qwen3-8b", 4, 4), ("qwen3-30b-a3b", 16, 32), ("qwen3-30b-a3b-8gpus", 2, 4)]


@pytest.mark.parametrize(("name", "engines", "training"), LAYOUTS)
def test_a_recipe_is_simulated_on_its_own_layout(name: str, engines: int, training: int) -> None:
    cluster = simulation_of(load_recipe(SCALE / f"{name}.toml"), SimulateOptions()).cluster
    assert (cluster.engines, cluster.training_gpus) == (engines, training)
    assert cluster.cost.kv_tokens > 18 * 18432


@pytest.mark.parametrize("path", sorted(SCALE.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(path)
    config, parameters = SHAPES[recipe.model.path]
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    recipe.model.path = str(tmp_path)
    plan = plan_memory(recipe)
    assert plan.parameters == pytest.approx(parameters, rel=1e-3)
    assert (plan.rank | plan.host)["optimizer"] == pytest.approx(8 * parameters / recipe.trainer.processes, rel=0.01)
    assert all(phase.total < SHARE * GPU for phase in phases(plan, recipe))
    assert (
        run(["memory", str(path), "--model.path", str(tmp_path), "--processes", "24", "--context-parallel", "3"]) == 2
    )
    assert "does not divide the 32 num_attention_heads" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b-8gpus"])
def test_a_dry_run_accepts_a_recipe_on_8_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(SCALE / f"{name}.toml"), "--gpus", "8", "--gpu-memory", "80"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": fits") == 3
    assert "unused" not in printed
    mixture = name != "qwen3-8b"
    assert ("experts of a layer: grouped_mm" in printed) == mixture
    assert ("in the machine's memory: 488.5 GB" in printed) == mixture


def test_offloaded_parameters_gradients_and_optimizer_are_in_the_machines_memory() -> None:
    recipe = load_recipe(SCALE / "qwen3-30b-a3b-8gpus.toml")
    with known_model(recipe):
        offloaded = plan_memory(recipe)
        recipe.trainer.cpu_offload = False
        whole = plan_memory(recipe)
    assert offloaded.host == {name: whole.rank[name] for name in ("parameters", "optimizer", "gradients")}
    assert sum(whole.rank.values()) > GPU > sum(offloaded.rank.values())
    assert offloaded.rank["gathered layers"] == whole.rank["gathered layers"] > 0
