"""What ranks do in the test of the trainer's memory in host memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from april.training.offload import EVERY_PART, Part
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner
from tests import tiny
from tests.ranks.updates import settings
from tests.training.steps import rollout


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sent(learner: ShardedLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for names in learner.buckets() for name, tensor in learner.gather(names)}


def round_trips(ranks: Ranks, cases: list[str]) -> None:
    """Shards that leave the device after each step are trained and sent as shards that stay, to the bit."""
    for case in cases:
        # 101 rows of the embedding on two ranks: one of them has a padded shard.
        stays, leaves = (
            ShardedLearner(tiny.model(sharpness=1.0), settings(case), ranks, tiny.tokenizer()) for _ in range(2)
        )
        for step in (1, 2, 3):
            stays.train(rollout(step), step)
            leaves.train(rollout(step), step)
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


def save(ranks: Ranks, directory: str) -> None:
    """Files are the same from host memory."""
    learner = ShardedLearner(tiny.model(sharpness=1.0), settings("reference"), ranks, tiny.tokenizer())
    learner.train(rollout(1), 1)
    for name in ("device", "host"):
        place = Path(directory) / name
        place.mkdir(parents=True, exist_ok=True)
        ranks.wait()
        learner.save(place)
        learner.to_host()
