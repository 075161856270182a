"""TRL's `GRPOTrainer` with a real server behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from april.engines.servers.launch import Server
from april.integrations.trl import PartialRollouts
from april.integrations.trl.async_grpo import AsyncGRPOTrainer
from tests import tiny
from tests.integrations.trl.on_cpu import without_a_gpu
from tests.integrations.trl.trainer import TEMPLATE, Compared, Reward, largest, rows
from tests.servers.conftest import Kind

AGREES = 1e-3
"""Largest difference of log-probabilities between a server and the trainer, both in float32."""

TRAINING: Any = {
    "per_device_train_batch_size": 12,
    "num_generations": 3,
    "max_completion_length": 60,
    "learning_rate": 3e-3,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "max_steps": 4,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.mark.parametrize("transfer", ["disk", "broadcast", "use_vllm", "adapters"])
def test_a_running_server(transfer: str, kind: Kind, server: Server, models: list[Path], tmp_path: Path) -> None:
    """The server was started on different weights: it gets the run's weights first."""
    written, lora = transfer == "use_vllm", transfer == "adapters"
    if written and kind.name != "vllm":
        pytest.skip("TRL knows vLLM servers only")
    policy = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    policy.generation_config.eos_token_id = [1, 20, 21, 22]
    trained = Compared(
        model=policy,
        reward_funcs=Reward(),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            **TRAINING,
            logging_steps=1,
            use_vllm=written,
            vllm_mode="server",
            vllm_server_base_url=server.url if written else None,
            vllm_importance_sampling_correction=False,
        ),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"]) if lora else None,
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
        partial_rollouts=PartialRollouts(
            # Of 4 groups a step, at most 2 go over to the next one, so every step has new tokens.
            over_sampling_batch_size=6,
            **({} if written else {"engine": kind.name, "urls": (server.url,)}),
            weight_transfer="broadcast" if transfer == "broadcast" else "disk",
        ),
    )
    try:
        trained.train()
    finally:
        trained.close()
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert [entry["april/policy_version"] for entry in logged] == [0, 1, 2, 3]
    assert any(entry["april/samples_resumed"] > 0 for entry in logged)
    current, older = largest(trained.differences)
    assert current < AGREES
    assert older > AGREES, "no update changed what tokens are drawn from: the test saw nothing"
    assert server.process.returncode is None, "a server that april did not start goes on"


def test_a_server_behind_the_asynchronous_trainer(
    kind: Kind, server: Server, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It generates while TRL trains. The first batch is trained on under the weights that drew it."""
    without_a_gpu(monkeypatch)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    numbers = range(24)
    trained = AsyncGRPOTrainer(
        str(models[1]),
        Reward(),
        AsyncGRPOConfig(
            output_dir=str(tmp_path),
            **TRAINING,
        ),
        Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"{n}?"}] for n in numbers], "answer": list(numbers)}
        ),
        tokenizer,
        partial_rollouts=PartialRollouts(over_sampling_batch_size=6, engine=kind.name, urls=(server.url,)),
    )
    trained.train()
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert logged[0]["ratio"] == pytest.approx(1, abs=AGREES)
    assert logged[0]["kl"] == pytest.approx(0, abs=AGREES)
    assert 0 < max(entry["sample/staleness_max"] for entry in logged) <= trained.args.max_staleness
    assert any(entry.get("april/off_policy_token_share", 0) > 0 for entry in logged)
    assert not any("sample/dropped_stale_total" in entry for entry in logged)
    assert server.process.returncode is None, "a server that april did not start goes on"
