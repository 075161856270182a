"""TRL's trainer in two processes that share one policy, by FSDP2 or by DeepSpeed's ZeRO."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from april.integrations.trl.whole_model import WholeModel
from tests import tiny
from tests.integrations.model_server import SGLangServer
from tests.integrations.trl.launch import launch

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed (scripts/setup_trl.sh)")


FSDP2 = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("fsdp2", FSDP2),
        pytest.param("zero2", "--use_deepspeed --zero_stage 2", marks=NEEDS_DEEPSPEED),
        pytest.param("zero3", "--use_deepspeed --zero_stage 3", marks=NEEDS_DEEPSPEED),
    ],
)
def test_a_sharded_policy_generates_and_resumes(tmp_path: Path, how: str, options: str) -> None:
    done = launch(options, "sharded_job", str(tmp_path), how, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)):
        straight, resumed = rank["straight"], rank["resumed"]
        fresh, older = zip(*straight["differences"], strict=True)
        assert max(fresh) < 1e-4
        assert max(older) > 1e-3, "no update changed what tokens are drawn from: the test saw nothing"
        assert resumed["batches"] == straight["batches"][2:]
        assert [entry["loss"] for entry in resumed["logs"]] == [entry["loss"] for entry in straight["logs"]]


@pytest.mark.slow
def test_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    """accelerate 1.15 itself stops on a CPU if FSDP1 shall copy the weights of process 0 to the others."""
    options = f"{FSDP2.replace('fsdp_version 2', 'fsdp_version 1')} --fsdp_sync_module_states false"
    done = launch(f"{options} --fsdp_cpu_ram_efficient_loading false", "sharded_job", str(tmp_path), "fsdp1")
    assert done.returncode != 0
    assert "FSDP1: april's GRPOTrainer" in done.stderr
    assert "--fsdp_version 2" in done.stderr


@pytest.mark.slow
def test_one_server_generates_for_a_sharded_policy(tmp_path: Path) -> None:
    """Process 0 drives the server, which samples with the trained weights: shards are gathered at each update."""
    tiny.save(tmp_path / "served", seed=1)
    server = SGLangServer(tmp_path / "served")
    done = launch(FSDP2, "sharded_job", str(tmp_path), "fsdp2", server.url)
    server.close()
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text())["straight"] for rank in range(2)]
    samples = [tuple(sample[:2]) for rank in ranks for batch in rank["batches"] for sample in batch]
    assert len(set(samples)) == len(samples) == 4 * 12, "every sample of four batches is trained on once"
    fresh, older = zip(*(difference for rank in ranks for difference in rank["differences"]), strict=True)
    assert max(fresh) < 1e-3
    assert max(older) > 1e-3, "no update changed what tokens are drawn from: the test saw nothing"
    assert server.asked >= len(samples)


def test_the_copy_that_generates_is_on_the_trainers_device() -> None:
    """Sharded later, the model itself is still where it was loaded."""
    model = tiny.model()
    whole = WholeModel(model, True, torch.device("meta"))
    assert {parameter.device.type for parameter in whole.copy.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
