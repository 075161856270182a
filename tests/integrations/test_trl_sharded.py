"""TRL's trainer in two processes that share one policy, by FSDP2 or by DeepSpeed's ZeRO."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from april.integrations.trl_sharded import WholeModel
from tests import tiny
from tests.integrations.trl_launch import launch

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed (scripts/setup_trl.sh)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("fsdp2", "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
        pytest.param("zero2", "--use_deepspeed --zero_stage 2", marks=NEEDS_DEEPSPEED),
        pytest.param("zero3", "--use_deepspeed --zero_stage 3", marks=NEEDS_DEEPSPEED),
    ],
)
def test_a_sharded_policy_generates_and_resumes(tmp_path: Path, how: str, options: str) -> None:
    done = launch(options, "trl_sharded_job", str(tmp_path), how, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)):
        straight, resumed = rank["straight"], rank["resumed"]
        fresh, older = zip(*straight["differences"], strict=True)
        assert max(fresh) < 1e-4
        assert max(older) > 1e-3, "no update changed what tokens are drawn from: the test saw nothing"
        assert resumed["batches"] == straight["batches"][2:]
        assert [entry["loss"] for entry in resumed["logs"]] == [entry["loss"] for entry in straight["logs"]]


def test_the_copy_that_generates_is_on_the_trainers_device() -> None:
    """Sharded later, the model itself is still where it was loaded."""
    model = tiny.model()
    whole = WholeModel(model, True, torch.device("meta"))
    assert {parameter.device.type for parameter in whole.copy.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
