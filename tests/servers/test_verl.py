"""april in verl, with verl's trainer loop, replay buffer, TransferQueue and agent loops, on a real SGLang server.

`tests/integrations/verl/real_server.py` is the replica: verl's own cannot use a server that runs already, and the
module of its vLLM replicas does not import on a CPU (`verl.third_party.vllm` asks for a distribution named vllm).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("transfer_queue", reason="verl is not installed here: scripts/setup_verl.sh")
pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

from april.engines.servers.launch import Server
from tests.integrations.restart import own_ray
from tests.integrations.verl.real_server import RunningServers
from tests.integrations.verl.test_trainer import check
from tests.integrations.verl.trainer import TinyTrainer, config_of, save_policy, save_prompts, train
from tests.servers.conftest import start_sglang

STEPS = 3


class Trainer(TinyTrainer):
    servers = RunningServers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    save_policy(folder / "model")
    save_prompts(folder / "prompts.parquet", 40)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Server]:
    async with start_sglang(folder / "model", folder) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(Path(__file__).parent):
        yield


def test_it_trains_on_interrupted_samples_of_a_real_server(folder: Path, server: Server, cluster: None) -> None:
    """Each token of each row has the log-probability of the policy that its version names, as Hugging Face computes it:
    requests were aborted, the server took new weights, and the samples were resumed."""
    where = f"+actor_rollout_ref.rollout.custom={{url:'{server.url}',folder:'{folder / 'policies'}'}}"
    settings = (where, "data.max_response_length=300", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1")
    trained = train(config_of(folder / "model", folder / "prompts.parquet", folder / "checkpoints", *settings), Trainer)
    assert len(trained.batches) == STEPS
    check(trained.batches)
    spans = [len(set(row["extra_fields"]["policy_versions"])) for batch in trained.batches for row in batch]
    assert max(spans) > 1, "no sample was resumed under new weights"
