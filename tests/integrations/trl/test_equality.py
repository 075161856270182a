"""With N' = N, april's trainer for TRL logs what plain TRL logs: each setting that changes TRL's loss or its rhythm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trl.plain import differences, metrics

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
QUICK: dict[str, dict[str, Any]] = {
    "gradient accumulation": {},
    "num_iterations": {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 6},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
}
SLOW: dict[str, dict[str, Any]] = {
    **{f"loss {loss}": {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    "loss luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "loss gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "kl": {"beta": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "steps_per_generation": {"steps_per_generation": 4, "max_steps": 6},
    "one micro-batch": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "streamed": {"streamed": True, "shuffle_dataset": False},
    "scale_rewards": {"scale_rewards": "batch"},
    **{
        f"correction {mode}": {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_mode": mode}
        for mode in CORRECTIONS
    },
    "no correction": {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False},
    "mask_truncated_completions": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("settings", QUICK.values(), ids=QUICK)
def test_every_metric_is_plain_trls(settings: dict[str, Any], tmp_path: Path) -> None:
    assert differences(metrics(tmp_path, True, settings), metrics(tmp_path, False, settings)) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", SLOW.values(), ids=SLOW)
def test_every_metric_is_plain_trls_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    assert differences(metrics(tmp_path, True, settings), metrics(tmp_path, False, settings)) == []
