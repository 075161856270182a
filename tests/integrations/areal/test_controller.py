"""AReaL's single controller, its default: the script runs in a process of its own, ranks and servers in others.

scripts/setup_areal.sh makes an environment for it; run this file with that environment's Python.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("areal", reason="AReaL is not installed here: scripts/setup_areal.sh")

from areal.api.cli_args import PPOConfig

from tests.integrations.areal.controller import ControlledTrainer
from tests.integrations.areal.test_trainer import check_training, prompts, samples
from tests.integrations.areal.trainer import configuration, prepare
from tests.integrations.restart import begun_in, goes_on, once_an_epoch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AREAL_SPMD_MODE", raising=False)
    prepare(tmp_path)
    return tmp_path


def controlled(folder: Path, **changed: Any) -> PPOConfig:
    return configuration(folder, scheduler__type="local", actor__backend="fsdp:d2", **changed)


def train(config: PPOConfig, workflow: Any = "areal.workflow.rlvr.RLVRWorkflow") -> ControlledTrainer:
    trainer = ControlledTrainer(config)
    told = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    try:
        trainer.train(
            workflow=workflow, workflow_kwargs={"reward_fn": "tests.integrations.areal.trainer.reward", **told}
        )
    finally:
        trainer.close()
    return trainer


def test_the_single_controller_deals_whole_groups_to_its_ranks_and_resumes_them(folder: Path) -> None:
    first = train(controlled(folder, rollout__backend="sglang:d2", total_train_steps=2))
    check_training(first)
    (path,) = folder.rglob("dataloader_info.pkl")
    (info,) = pickle.loads(path.read_bytes())
    begun = begun_in(info["april"]["scheduler"]["state"]["buffer"]["groups"])
    second = train(controlled(folder, rollout__backend="sglang:d2"))
    assert (len(first.steps), len(second.steps)) == (2, 2), "the epoch's four steps"
    goes_on(begun, samples(first), samples(second))
    assert second.steps[0].version == 2
    once_an_epoch([*prompts(first), *prompts(second)])


def test_requests_name_the_lora_adapter_of_their_version(folder: Path) -> None:
    lora = {"rollout__use_lora": True, "actor__use_lora": True, "actor__lora_rank": 4, "actor__lora_alpha": 8}
    config = controlled(folder, gconfig__lora_name="adapter", actor__target_modules=["all-linear"], **lora)
    config.total_train_steps = 3
    trainer = train(config)
    assert len(trainer.steps) == 3
    check_training(trainer)
