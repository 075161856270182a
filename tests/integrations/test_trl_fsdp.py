"""TRL's trainer in two processes that share one policy by FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from april.integrations.trl_sharded import WholeModel
from tests import tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_sharded_policy_generates_and_resumes(tmp_path: Path) -> None:
    command = "accelerate.commands.launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    processes = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    script = ["-m", "tests.integrations.trl_fsdp_job", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), *processes.split(), *script],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
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
