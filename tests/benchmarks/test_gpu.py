"""The script for a GPU, on small shapes on the CPU: its parts run, and its figures say what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu


def test_an_interrupted_sample_equals_the_undisturbed_one() -> None:
    found = gpu.exactness(gpu.Bench("cpu", tiny=True))
    assert found["resumed"]["equal_responses"] == found["recomputed"]["equal_responses"] == 1
    assert found["logprob_error"] < 1e-4
    json.dumps(found)


def test_a_roofline_is_compared_where_a_data_sheet_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu.roofline_against_measured(gpu.Bench("cpu", tiny=True))
    assert found["data_sheet"] is None
    assert [row["batch"] for row in found["tiny"]["decode_step_seconds"]] == [1, 4]
    assert all(row["measured"] > 0 and row["roofline"] is None for row in found["tiny"]["decode_step_seconds"])


def test_a_part_that_is_not_done_in_time_costs_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "exactness", (gpu.exactness, 0.5))
    assert gpu.run_apart("exactness", gpu.Bench("cpu", tiny=True)) == {"failed": "not done after 0.5 s"}


def test_without_a_gpu_it_says_so() -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, gpu.__file__], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == "torch sees no GPU: install its CUDA or ROCm build, or try the script by --device cpu --tiny"
    )
