"""GPUs that are shared or split, with engines on one or several of them."""

from __future__ import annotations

import pytest

from april.simulation.cluster import gpu_cluster, least_training_gpus
from april.simulation.hardware import GPUS, MODELS
from april.simulation.split import try_splits

H100, QWEN = GPUS["h100"], MODELS["qwen3-8b"]


def test_the_trainers_state_on_a_shared_gpu_does_not_depend_on_the_engines() -> None:
    one = gpu_cluster(H100, QWEN, 8, slots=64).cost.kv_tokens * QWEN.kv_bytes
    two = gpu_cluster(H100, QWEN, 8, slots=64, engine_gpus=2).cost.kv_tokens * QWEN.kv_bytes
    weights = 2 * QWEN.parameters
    assert two == pytest.approx(2 * one + weights, rel=0.001), "two GPUs hold the weights once, the state twice"


@pytest.mark.parametrize("engine_gpus", [1, 2, 7])
def test_every_split_leaves_an_engine_its_gpus(engine_gpus: int) -> None:
    model = min(MODELS.values(), key=lambda shape: shape.parameters)
    least = least_training_gpus(H100, model, 8, engine_gpus=engine_gpus)
    tried = try_splits(8 - engine_gpus + 1, least, lambda training: float(training))
    assert tried[-1].training_gpus == 8 - engine_gpus


def test_an_engine_on_every_gpu_leaves_none_to_train() -> None:
    with pytest.raises(ValueError, match="8 GPUs for engines and one for the trainer"):
        least_training_gpus(H100, QWEN, 8, engine_gpus=8)
