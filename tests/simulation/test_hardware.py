from __future__ import annotations

import pytest

from april.simulation.hardware import (
    GPUS,
    LORA_TRAINER_BYTES,
    MODELS,
    Roofline,
    check_trainer,
    roofline,
    training_seconds_per_token,
)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5), ("r1-distill-1.5b", 1.78)]
)
def test_shapes_have_the_parameters_of_their_model_cards(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_token_computes_with_its_experts_and_a_batch_reads_the_experts_of_all_tokens() -> None:
    shape = MODELS["qwen3-30b-a3b"]
    assert shape.matrix_parameters / 1e9 == pytest.approx(3.3 - 0.31, rel=0.02), "3.3 B with the embedding"
    assert shape.read_parameters(1) == pytest.approx(shape.matrix_parameters)
    reads = [shape.read_parameters(tokens) for tokens in (1, 16, 256)]
    assert reads == sorted(reads)
    assert reads[-1] == pytest.approx(shape.parameters - 2048 * 151936, rel=1e-3)
    dense = MODELS["qwen3-8b"]
    assert dense.read_parameters(1) == dense.read_parameters(256) == dense.matrix_parameters


def test_joined_gpus_have_the_sum_of_memory_and_speed() -> None:
    two = GPUS["h100"].times(2)
    assert (two.memory, two.bandwidth, two.flops) == (160e9, 6.7e12, 1978e12)
    one, both = (roofline(gpu, MODELS["qwen3-8b"]).kv_tokens for gpu in (GPUS["h100"], two))
    assert both > 2 * one, "the weights are there once"


def test_kv_bytes_of_a_token() -> None:
    assert MODELS["qwen3-8b"].kv_bytes == 36 * 8 * 128 * 2 * 2 == 147456


def test_a_decode_step_is_bound_by_memory_at_small_batches_and_by_compute_at_large_ones() -> None:
    ideal = Roofline(bandwidth_share=1, compute_share=1, step_overhead=1e-12, slots=1024)
    cost = roofline(GPUS["h100"], MODELS["qwen3-8b"], ideal)
    base, weights = cost.base(), 2 * MODELS["qwen3-8b"].matrix_parameters
    assert base[1] == pytest.approx(weights / 3.35e12)
    assert base[64] == pytest.approx(base[1]), "below 295 samples, the weights are read anyway"
    assert base[1024] == pytest.approx(1024 * weights / 989e12)
    assert cost.kv_token_seconds == pytest.approx(147456 / 3.35e12)


def test_colocated_training_leaves_less_room_for_the_kv_cache() -> None:
    model = MODELS["qwen3-8b"]
    apart, eight, many, four = (roofline(GPUS["h200"], model, trainer_gpus=n).kv_tokens for n in (0, 8, 64, 4))
    assert apart > eight == many > four, "a trainer spreads over a node at most"
    assert (apart - four) * model.kv_bytes == pytest.approx(16 * model.parameters / 4, rel=1e-4)
    lora = roofline(GPUS["h200"], model, trainer_gpus=1, trainer_bytes=LORA_TRAINER_BYTES)
    assert apart > lora.kv_tokens > 0


def test_a_trainer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"131 GB for its part of the trainer's state and does not fit a h100"):
        roofline(GPUS["h100"], MODELS["qwen3-8b"], trainer_gpus=1)
    with pytest.raises(ValueError, match=r"take 131 GB: training needs more GPUs than 1 h100 \(80 GB each\)"):
        check_trainer(GPUS["h100"], MODELS["qwen3-8b"], 1)
    check_trainer(GPUS["h100"], MODELS["qwen3-8b"], 2)
    check_trainer(GPUS["h100"], MODELS["qwen3-8b"], 1, LORA_TRAINER_BYTES)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a h100"):
        roofline(GPUS["h100"], MODELS["qwen3-8b"], Roofline(memory_share=0.1))


def test_training_is_shared_by_the_gpus() -> None:
    eight, one = (training_seconds_per_token(GPUS["h200"], MODELS["qwen3-4b"], n) for n in (8, 1))
    assert one == pytest.approx(8 * eight)
