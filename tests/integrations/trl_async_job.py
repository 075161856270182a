"""What each process of an asynchronous job does: `accelerate launch ... -m tests.integrations.trl_async_job FOLDER`.

Adapters are trained. Process 0 generates for both; at the end process 1 dies in the middle of a training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.integrations.test_trl_async import trainer
from tests.integrations.trl_job import Dies
from tests.integrations.trl_on_cpu import without_a_gpu


def record(trained: Any) -> dict[str, Any]:
    model = trained.accelerator.unwrap_model(trained.model)
    model.merge_adapter()
    merged = {name: p.double().sum().item() for name, p in model.base_model.model.named_parameters()}
    model.unmerge_adapter()
    theirs = dict(trained.rollouts.model.named_parameters()) if trained.rollouts is not None else {}
    return {
        "merged": {name.replace(".base_layer", ""): value for name, value in merged.items() if "lora_" not in name},
        "generates": {name: parameter.double().sum().item() for name, parameter in theirs.items()},
        "logs": [entry for entry in trained.state.log_history if "loss" in entry],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    without_a_gpu(pytest.MonkeyPatch())
    adapter = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    straight = trainer(folder, adapter=adapter, **settings)
    straight.train()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record(straight)))
    dying = trainer(folder, adapter=adapter, max_steps=8, **settings)
    dying.add_callback(Dies(5))
    dying.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
