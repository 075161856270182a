"""What ranks do in the test of the trainer's memory in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from april.training.learner_settings import LearnerSettings
from april.training.offload import EVERY_PART, Part
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner
from april.training.stored_names import cut
from tests import tiny
from tests.engines.ipc_files import SharedFiles
from tests.engines.test_cuda_ipc import read
from tests.ranks.updates import settings
from tests.training.steps import rollout


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sent(learner: ShardedLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for names in learner.buckets() for name, tensor in learner.gather(names)}


def round_trips(ranks: Ranks, cases: list[str], directory: str) -> None:
    """Shards that leave the device after each step are trained, written and sent as shards that stay, to the bit."""
    for case in cases:
        # 101 rows of the embedding on two ranks: one of them has a padded shard.
        stays, leaves = (
            ShardedLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings(case)), ranks, tiny.tokenizer())
            for _ in range(2)
        )
        for step in (1, 2, 3):
            stays.train(rollout(step), step)
            leaves.train(rollout(step), step)
            leaves.save_weights(Path(directory))
            sent = _sent(stays)
            leaves.to_host()
            held = [t for part in Part for t in leaves.offload._tensors(part)]
            assert sum(_local(t).untyped_storage().nbytes() for t in held) == 0
            found = _sent(leaves)
            assert sent.keys() == found.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in sent.items())
            leaves.to_device(EVERY_PART - {Part.OPTIMIZER})
            leaves.to_device()
            expected, state = stays.state(), leaves.state()
            for name in expected.keys() - {"random"}:
                assert torch.equal(_local(expected[name]), _local(state[name])), name
        print(f"{case}: ok", flush=True)


def root(ranks: Ranks) -> None:
    """After the canary is scored, nothing of the root module stays on the device: neither whole nor as shards."""
    learner = ShardedLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings("grpo")), ranks, tiny.tokenizer())
    learner.train(rollout(1), 1)
    shards = [parameter._local_tensor.untyped_storage() for parameter in learner.policy.parameters()]
    scores = learner.token_logprobs([[3, 1, 4, 1], [5, 9, 2, 6]])
    assert all(hasattr(parameter, "_local_tensor") for parameter in learner.policy.parameters()), "gathered"
    whole = _whole_storages(learner.policy)
    assert whole, "the root's gathered parameters are found"
    assert sum(storage.nbytes() for storage in whole) == 0
    learner.to_host()
    assert sum(storage.nbytes() for storage in shards) == 0
    learner.to_device()
    assert learner.token_logprobs([[3, 1, 4, 1], [5, 9, 2, 6]]) == scores
    print("ok", flush=True)


def _whole_storages(module: Any) -> list[torch.UntypedStorage]:
    """Storages of the parameters that FSDP2 has gathered for the root module so far."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [
        tensor.untyped_storage()
        for parameter in group.fsdp_params
        for tensor in (*parameter.all_gather_outputs, parameter._unsharded_param)
    ]


def save(ranks: Ranks, directory: str) -> None:
    """Files are the same from host memory."""
    learner = ShardedLearner(
        tiny.model(sharpness=1.0), LearnerSettings.of(settings("reference")), ranks, tiny.tokenizer()
    )
    learner.train(rollout(1), 1)
    for name in ("device", "host"):
        place = Path(directory) / name
        place.mkdir(parents=True, exist_ok=True)
        ranks.wait()
        learner.save(place)
        learner.to_host()


def export(ranks: Ranks, directory: str) -> None:
    """Every rank shares the whole bucket on its own device, also of shards in host memory; the last one is let go."""
    learner = ShardedLearner(tiny.mixture(sharpness=1.0), LearnerSettings.of(settings("grpo")), ranks, tiny.tokenizer())
    learner._share = SharedFiles(Path(directory), ranks.rank)
    expected = dict(cut(_sent(learner).items(), learner.parts))
    learner.to_host()
    found: dict[str, Tensor] = {}
    for names in learner.buckets(5000):
        exported = learner.export(names)
        assert len(exported.handles) == 2
        one, other = (read(exported, gpu) for gpu in exported.handles)
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        found |= one
    learner.release_export()
    assert learner._exported is None
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
