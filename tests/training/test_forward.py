"""A wrapper that shards the policy sees one call, and every parameter that is used is used inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from april.algorithms.batch import Batch
from april.training.forward import PolicyModel
from april.training.packing import packed_attention
from tests import tiny
from tests.training.steps import rollout


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_policy_has_the_scores_and_gradients_of_an_unsharded_one(tied: bool) -> None:
    step = rollout(0)
    batch = Batch.of([sample for group in step.groups for sample in group.samples], step.version)
    whole, sharded = (PolicyModel(tiny.model(sharpness=1.0, tie_word_embeddings=tied), 0.7) for _ in range(2))
    for layer in sharded.model.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    with packed_attention(whole.model, sharded.model):
        for policy in (whole, sharded):
            logp, entropy = policy(batch)
            (logp.sum() + entropy.square().sum()).backward()
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
