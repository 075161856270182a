"""The learner of several ranks, each with a shard of the parameters (PyTorch FSDP2).

Invariants:
- the batch is whole on every rank, and only forwards and backwards are dealt out, as many to each rank; so advantages,
  corrections, denominators, and whether an update is made, are those of one process, and the same on all ranks;
- models are checked, copied and given adapters while they are whole, and sharded before an optimizer sees them;
- outside of a forward and backward pass a rank holds its shards alone; whatever is gathered, one bucket at a time, is
  let go again, but for the copy that an engine in the leader's process computes with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from april.algorithms.batch import Batch
from april.algorithms.objective import Sums
from april.config.recipe import Recipe
from april.engines.weights import SharedParameters, WeightTransfer
from april.training.checkpoint import TRAINING
from april.training.learner import Interrupted
from april.training.local import LocalLearner
from april.training.micro_batches import share
from april.training.packing import attends_packed
from april.training.policy import describe_policy
from april.training.ranks import Ranks
from april.training.recovery import Memory, is_out_of_memory
from april.training.shards import write

T = TypeVar("T")


class MemoryShortage(Exception):
    """This rank ran out of memory, and the others wait for it: all have to start anew, with smaller micro-batches.

    Args:
        tokens: of a micro-batch from then on.
    """

    def __init__(self, tokens: int, reason: str) -> None:
        super().__init__(reason)
        self.tokens = tokens


class RankMemory(Memory):
    """As `Memory`, but what ran out of memory cannot be done again here: the other ranks are in the middle of it."""

    def fit(self, work: Callable[[], T], lengths: Sequence[int]) -> T:
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            self.shrink(min(lengths, default=1), reason)
            raise MemoryShortage(self.tokens, reason) from None


class ShardedLearner(LocalLearner):
    """One rank's part of a learner; all ranks call its methods together, in the same order.

    Args:
        model: a Hugging Face causal LM, whole, the same on all ranks.
        directory: the run's, on the leader; None elsewhere.
    """

    def __init__(
        self, model: Any, recipe: Recipe, ranks: Ranks, tokenizer: Any = None, directory: Path | None = None
    ) -> None:
        self.ranks = ranks
        self._generates = ranks.leads and recipe.engine.engine == "embedded"
        self._copy: Any = None
        super().__init__(model, recipe, tokenizer, directory)
        self.memory = RankMemory(recipe.training.max_tokens_per_micro_batch)
        self.device = ranks.device

    def _place(self) -> None:
        if self._generates:
            self._copy = self.adapters.merged_model() if self.adapters else copy.deepcopy(self.model)
            self._copy.requires_grad_(False).to(self.ranks.device)
        for module in (self.policy, self.reference, self.critic):
            if module is not None:
                shard(module, self.ranks)

    def _way_to_engine(self, recipe: Recipe, directory: Path) -> WeightTransfer:
        return SharedParameters()

    @property
    def served(self) -> Any:
        """The leader's whole copy of the policy, which `weights` brings up to date."""
        return self._copy

    @torch.no_grad()
    def weights(self, version: int) -> Any:
        own = dict(self._copy.named_parameters()) if self._generates else {}
        for name, make in self._sources().items():
            tensor = whole(make())
            if name in own:
                own[name].copy_(tensor)
        return super().weights(version) if self.ranks.leads else None

    def _sources(self) -> dict[str, Callable[[], Tensor]]:
        """What makes each parameter that engines know, by its name; a shard of it on each rank."""
        if self.adapters:
            return self.adapters.merging()
        return {name: parameter.detach for name, parameter in self.model.named_parameters()}

    def _passes(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        place = self.ranks.rank, self.ranks.world
        for part in share(batch.lengths, rows, self.memory.tokens, attends_packed(self.model), *place):
            if self._interrupted.is_set():
                raise Interrupted
            yield part, batch.rows(part, self.device) if part else self._nothing(batch)

    def _nothing(self, batch: Batch) -> Batch:
        """A micro-batch that adds nothing, for a pass that the other ranks need this one for."""
        shortest = min(range(len(batch)), key=batch.lengths.__getitem__)
        empty = batch.rows([shortest], self.device)
        empty.mask.zero_()
        return empty

    @torch.no_grad()
    def _score(self, score: Callable[[Batch], Tensor], batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
        scores = self.ranks.sum(super()._score(score, batch, rows))
        for module in (self.policy, self.reference, self.critic):
            if isinstance(module, FSDPModule):
                module.reshard()  # the root's own parameters stay whole after a pass without a backward
        return scores

    def gradient(self, batch: Batch) -> Sums:
        return self.ranks.total(super().gradient(batch))

    def save(self, directory: Path) -> None:
        """Write the policy as transformers loads it, and all else that training changed; each rank its own rows."""
        if self.ranks.leads:
            describe_policy(directory, self.model, self.tokenizer)
            (directory / TRAINING).mkdir(exist_ok=True)
        self.ranks.wait()
        self.save_policy(directory)
        self.save_state(directory, self.ranks.rank)
        self.ranks.wait()

    def save_policy(self, directory: Path) -> None:
        parameters = {name.replace(".base_layer.", "."): p for name, p in self.model.named_parameters()}
        kept = {name: buffer for name, buffer in self.model.named_buffers() if name in self.model.state_dict()}
        sources = self._sources() | {name: buffer.detach for name, buffer in kept.items()}
        policy = {name: tensor for name, tensor in {**parameters, **kept}.items() if name in sources}
        write(directory, "model", policy, self.ranks.rank, lambda name: sources[name]())


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Shard a model over the ranks, layer by layer, in place. Gradients are summed, not averaged."""
    for layer in [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(module, mesh=ranks.mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its rows; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
