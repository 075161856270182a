"""Measured memory of ranks in training, against the plan."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from april.config.recipe import Recipe
from april.training.memory_plan import plan_memory
from april.training.micro_batches import shares
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner
from tests import tiny
from tests.training.steps import recipe, rollout


class Held(TorchDispatchMode):
    """The most bytes at a time of the tensors that were made inside.

    Args:
        before: those that were there, of which views are made inside.
    """

    def __init__(self, before: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = _local(leaf).untyped_storage()
                if storage._cdata not in self._before:
                    self._made[storage] = None
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._made))
        return made


def peaks(ranks: Ranks, directory: str, policy: str, **trainer: Any) -> None:
    """Print this rank's peak memory in a training step, and the plan, by part."""
    chosen = recipe()
    chosen.model.path, chosen.model.device = directory, "cpu"
    chosen.trainer.processes = ranks.world
    for name, value in trainer.items():
        setattr(chosen.trainer, name, value)
    megatron = chosen.trainer.backend == "megatron"
    step = rollout(1, groups=4, longest=160)
    lengths = [len(sample.prompt_ids) + sample.length for group in step.groups for sample in group.samples]
    chosen.training.max_tokens_per_micro_batch = 4 * max(lengths)
    team, teams = ranks.team
    passes = shares(lengths, range(len(lengths)), 4 * max(lengths), not megatron, teams)[team]
    size = max(
        (len(part) * max(lengths[row] for row in part) if megatron else sum(lengths[row] for row in part), len(part))
        for part in passes
        if part
    )
    model = getattr(tiny, policy)(sharpness=1.0, hidden_size=64, intermediate_size=256, num_hidden_layers=6)
    if ranks.leads:
        model.save_pretrained(directory)
    ranks.wait()
    full = copy.deepcopy(chosen)
    full.training.max_tokens_per_micro_batch, rows = size
    full.rollout.max_response_length = full.training.max_tokens_per_micro_batch // rows
    plan = plan_memory(full).rank
    chosen.engine.engine = "vllm"  # whose copy of the policy is elsewhere
    learner = _learner(chosen)(model, chosen, ranks)
    learner.train(step, 1)
    state = (moment for moments in learner.optimizer.state.values() for moment in moments.values())
    kept = [_local(tensor.detach()) for tensor in (*learner.policy.parameters(), *state)]
    with Held(kept) as new:
        learner.train(step, 2)
    held = sum(tensor.nbytes for tensor in kept)
    print(json.dumps({"held": held + new.peak, "planned": sum(plan.values()), "parts": plan}), flush=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _learner(recipe: Recipe) -> type[ShardedLearner]:
    if recipe.trainer.backend != "megatron":
        return ShardedLearner
    from tests.integrations import megatron_on_cpu

    megatron_on_cpu.install()
    from april.training.megatron_learner import MegatronLearner

    return MegatronLearner
