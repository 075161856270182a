"""Tokens per second and MFU of training steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from april.commands.assumed import known_model
from april.config.recipe import Recipe
from april.engines.devices import DeviceMap
from april.engines.gpus import Gpu
from april.training.memory_plan import active_parameters
from april.training.utilisation import Utilisation, build_utilisation, peak_of


def test_peaks_of_known_gpus_match_their_specifications() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("AMD Instinct MI300X") == 1307e12
    assert peak_of("NVIDIA H100 PCIe") is None
    assert peak_of("NVIDIA GeForce RTX 4090") is None


def test_mfu_counts_six_flop_for_each_parameter_and_token() -> None:
    sample = SimpleNamespace(prompt_ids=(0,) * 100, length=900)
    step: Any = SimpleNamespace(groups=[SimpleNamespace(samples=[sample] * 4)])
    found = Utilisation(8 * 10**9, 989e12).of(step, 2.0)
    assert found["trained_tokens_per_second"] == 2000
    assert found["mfu"] == pytest.approx(6 * 8e9 * 2000 / 989e12)


def test_flops_of_a_token_count_only_its_experts() -> None:
    recipe = Recipe()
    recipe.model.path = "Qwen/Qwen3-30B-A3B"
    with known_model(recipe):
        assert active_parameters(recipe.model) == pytest.approx(3.04e9, rel=0.02)
    assert build_utilisation(recipe.model, None) is None
    assert build_utilisation(recipe.model, DeviceMap((Gpu("0", name="Unknown"),), ())) is None
