"""What each process of an asynchronous job does: `accelerate launch ... tests.integrations.trl.async_job FOLDER HOW`.

Adapters are trained, each process with a whole policy, or a whole policy that FSDP2 shards, on gloo. Process 0
generates for both; at the end process 1 dies in the middle of a training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from trl.experimental.async_grpo import AsyncGRPOConfig

from tests import tiny
from tests.integrations.trl.job import Dies
from tests.integrations.trl.on_cpu import without_a_gpu
from tests.integrations.trl.test_async_grpo import trainer


class Sharded(AsyncGRPOConfig):
    """accelerate heeds `--use_fsdp` where it finds accelerators: see `sharded_job`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def trained_weights(trained: Any) -> dict[str, torch.Tensor]:
    """By the names that the engine's model has."""
    model = trained.accelerator.unwrap_model(trained.model)
    if not hasattr(model, "merge_adapter"):
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "the policy is not sharded"
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    model.merge_adapter()
    merged = {name: p.clone() for name, p in model.base_model.model.named_parameters() if "lora_" not in name}
    model.unmerge_adapter()
    return {name.replace(".base_layer", ""): value for name, value in merged.items()}


def record(trained: Any) -> dict[str, Any]:
    weights = trained_weights(trained)
    base = dict(tiny.model().named_parameters())
    theirs = dict(trained.rollouts.model.named_parameters()) if trained.rollouts is not None else {}
    return {
        "trained": {name: value.double().sum().item() for name, value in weights.items()},
        "changed": [name for name, value in weights.items() if not torch.equal(value, base[name])],
        "generates": {name: parameter.double().sum().item() for name, parameter in theirs.items()},
        "logs": [entry for entry in trained.state.log_history if "loss" in entry],
    }


def main() -> None:
    folder, sharded = Path(sys.argv[1]), sys.argv[2] == "fsdp2"
    torch.set_num_threads(1)
    without_a_gpu(pytest.MonkeyPatch())
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    settings["kind"] = Sharded if sharded else AsyncGRPOConfig
    settings["adapter"] = None if sharded else LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    straight = trainer(folder, **settings)
    straight.train()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record(straight)))
    dying = trainer(folder, max_steps=8, **settings)
    dying.add_callback(Dies(5))
    dying.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
