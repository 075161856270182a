"""The check of a GPU, on small shapes on the CPU: its parts run, and its figures are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from gpu_parts import exactness, launches, memory, nccl, precision, roofline, shared
from gpu_parts.bench import Bench

BENCH = Bench("cpu", tiny=True)


def test_an_interrupted_sample_equals_the_undisturbed_one() -> None:
    found = dict(exactness.measure(BENCH))
    assert found["resumed"]["equal_responses"] == found["recomputed"]["equal_responses"] == 1
    assert found["logprob_error"] < 1e-4
    assert found["failures"] == []
    json.dumps(found)


def test_updates_at_a_small_learning_rate_change_only_float32_parameters() -> None:
    found = dict(precision.measure(BENCH))
    assert found["parameters in float32, computation in bfloat16"]["changed_share"] > 0.99
    assert found["parameters in bfloat16, computation in bfloat16"]["changed_share"] < 0.1
    assert found["failures"] == []


def test_a_roofline_is_compared_where_a_data_sheet_is_known() -> None:
    found = dict(roofline.measure(BENCH))
    assert found["data_sheet"] is None
    assert [row["batch"] for row in found["tiny"]["decode_step_seconds"]] == [1, 4]
    assert all(row["measured"] > 0 and row["roofline"] is None for row in found["tiny"]["decode_step_seconds"])


def test_operators_of_a_pass_are_counted() -> None:
    found = dict(launches.measure(BENCH))
    assert found["like lengths"]["operators"] > 50
    assert found["many lengths"]["samples"] == 7


def test_weights_travel_in_buckets_of_a_group_of_one() -> None:
    found = dict(nccl.measure(BENCH))
    assert found["buckets"] > 1
    assert found["bytes"] == sum(tensor.nbytes for tensor in BENCH.model(BENCH.shape).state_dict().values())


def test_memory_is_planned_for_the_shape_that_is_trained() -> None:
    found = dict(memory.measure(BENCH))
    parameters = sum(parameter.numel() for parameter in BENCH.model(BENCH.shape).parameters())
    assert found["planned"]["parameters"] == 4 * parameters
    assert found["planned_bytes"]["resident"] == (4 + 2 + 8) * parameters


def test_engine_and_trainer_in_turn_are_compared_with_synchronous_rollouts() -> None:
    found = dict(shared.measure(BENCH))
    assert found["synchronous"]["ratio_to_synchronous"] == 1
    assert found["resident"]["moved_bytes"] == 0
    parameters = sum(parameter.numel() for parameter in BENCH.model(BENCH.shape).parameters())
    assert found["shared"]["host_bytes"] >= 12 * parameters, "master weights and moments"
    assert found["shared"]["turn_seconds"].keys() == {"to host", "to device", "train"}
    assert found["freed"]["equal"]
    assert found["freed"]["bytes"] >= 14 * parameters
    assert found["split"]["consumed_tokens_per_second"] > 0
    json.dumps(found)


def test_a_call_takes_less_than_ten_minutes() -> None:
    limits = [part.limit for name, part in gpu.PARTS.items() if name not in ("shared", "vllm")]
    assert sum(limits) <= gpu.SECONDS < 600


def test_a_machine_without_a_gpu_is_reported() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, gpu.__file__], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == "torch sees no GPU: install its CUDA or ROCm build, or try the script by --device cpu --tiny"
    )
