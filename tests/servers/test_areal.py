"""AReaL's trainer and inference client with april's rollouts, on a real SGLang server.

AReaL starts SGLang 0.5.10 itself; this server is april's, and a later version. New weights go by AReaL's own call of
`/update_weights_from_disk`; its other way (`weight_update_mode = xccl`) needs NCCL, which needs CUDA.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("areal", reason="AReaL is not installed here: scripts/setup_areal.sh")

import torch
from areal.workflow.rlvr import RLVRWorkflow

from april.engines.servers.launch import Server
from tests.integrations.areal.test_trainer import check_training, samples
from tests.integrations.areal.trainer import Trainer, configuration, prepare, rank, reward
from tests.servers.conftest import start_sglang

STEPS = 3


class Watched(Trainer):
    """Keeps the weights of each version, as AReaL's own engine has them."""

    def _served(self) -> dict[str, torch.Tensor]:
        weights = self.actor.model.state_dict()
        return {name: getattr(value, "full_tensor", value.clone)().detach().clone() for name, value in weights.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which sampling a token takes longer than sending it, and a batch longer than training on one."""
    folder = tmp_path_factory.mktemp("areal")
    prepare(folder, layers=10, long=True)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Server]:
    async with start_sglang(folder / "model", folder) as server:
        yield server


def test_it_trains_on_interrupted_samples_of_a_real_server(
    folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of each trained sample has the log-probability of the weights that its version names, as
    Hugging Face computes it: samples were interrupted, the server took new weights, and the samples were resumed."""
    for name, value in rank().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", server.url.removeprefix("http://"))
    config = configuration(folder, total_train_steps=STEPS, gconfig__max_new_tokens=200)
    trainer = Watched(config)
    told = {"reward_fn": reward, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    try:
        trainer.train(workflow=RLVRWorkflow, workflow_kwargs=told)
    finally:
        trainer.close()
    assert len(trainer.steps) == STEPS
    check_training(trainer)
    assert any(len(sample.segments) > 1 for sample in samples(trainer)), "no sample was resumed under new weights"
