"""SkyRL's trainer and inference client with april's generator, on a real vLLM server.

SkyRL's own update of weights needs NCCL (`init_weight_transfer_engine` on its workers), which needs CUDA: the policy
worker writes weights to a directory here, and vLLM reads them. SkyRL starts vLLM 0.30 itself; this server is april's.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("skyrl", reason="SkyRL is not installed here: scripts/setup_skyrl.sh")
STAND_INS = Path(__file__).parents[1] / "integrations" / "skyrl" / "stand_ins"
sys.path.insert(0, str(STAND_INS))

import ray  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from april.engines.servers.launch import Server, launch_vllm  # noqa: E402
from april.integrations.settings import Settings  # noqa: E402
from tests.integrations.restart import own_ray  # noqa: E402
from tests.integrations.skyrl.test_trainer import Watch, check_policies  # noqa: E402
from tests.integrations.skyrl.trainer import (  # noqa: E402
    BATCH,
    GROUP,
    DiskPolicyWorker,
    configuration,
    prepare,
    tokenizer,
    train,
)
from tests.servers.conftest import small_launch  # noqa: E402
from tests.servers.tiny import tiny_model  # noqa: E402

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a model in which sampling a token takes longer than sending it."""
    folder = tmp_path_factory.mktemp("skyrl")
    prepare(folder)
    tiny_model(folder / "model", seed=0, layers=6)
    tokenizer().save_pretrained(folder / "model")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Server]:
    async with launch_vllm(folder / "model", small_launch("vllm", folder)) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(STAND_INS):
        yield


def test_it_trains_on_interrupted_samples_of_a_real_server(
    folder: Path, server: Server, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of each trained sample has the log-probability of the weights that its version names, as
    Hugging Face computes it: samples were interrupted, the server took new weights, and the samples were resumed."""
    monkeypatch.setattr(fsdp_worker, "PolicyWorker", ray.remote(num_gpus=1)(DiskPolicyWorker))
    changed: dict[str, Any] = {
        "trainer__ckpt_interval": -1,
        "trainer__max_training_steps": STEPS,
        "generator__sampling_params__max_generate_length": 80,
    }
    seen = Watch()
    train(configuration(folder, [server.url], **changed), Settings(over_sampling_batch_size=7), seen)
    assert [len(step.groups) for step in seen.steps] == [BATCH] * STEPS
    assert len(seen.samples) == STEPS * BATCH * GROUP
    weights = sorted((folder / "weights").iterdir())
    check_policies(seen, [AutoModelForCausalLM.from_pretrained(path).float() for path in weights])
    assert any(len(sample.segments) > 1 for sample in seen.samples), "no sample was resumed under new weights"
