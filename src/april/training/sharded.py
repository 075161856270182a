"""Learner of several ranks, each with a shard of the parameters (PyTorch FSDP2).

Invariants:
- every rank has the whole batch, and only forward and backward passes are distributed, in equal numbers; so advantages,
  corrections, denominators and the decision to update are, on all ranks, the same as in one process;
- each rank reads the images of its rows; with images in a batch, every pass of a rank computes at least one, since its
  other ranks gather the parameters of that part too;
- the leader alone has the routes of the batch; the other ranks receive the routes of their micro-batches;
- models are checked, copied and extended with adapters before they are sharded, and sharded before optimizers are made;
- outside forward and backward passes a rank holds only its shards; gathered parameters are freed bucket by bucket,
  except for the copy with which the rank's own engine computes.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from april.algorithms.batch import Batch
from april.algorithms.objective import UpdateSums
from april.config.error import ConfigError
from april.engines.cuda_ipc import Sharing, collect, packed_on
from april.engines.cuda_ipc import share as share_memory
from april.engines.device_memory import allocate, discard, held_bytes, is_out_of_memory
from april.engines.embedded.model import convert
from april.engines.weight_buckets import bucket_of, by_width
from april.engines.weight_transfer import Exported
from april.images.store import ImageStore
from april.training.checkpoint import ADAPTER, TRAINING
from april.training.context_parallel import context_parallel
from april.training.learner import Interrupted
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.master_weights import MasterWeights
from april.training.micro_batches import shares
from april.training.model_parallel import divide
from april.training.offload import EVERY_PART, Part
from april.training.packing import attends_packed
from april.training.policy import describe_policy, write_policy
from april.training.ranks import Ranks
from april.training.recovery import MicroBatchBudget
from april.training.route_exchange import exchanged
from april.training.stored_names import cut, stored_buffers, stored_parts, stored_sources, stored_tensors
from april.training.weight_transfer import shares_process

T = TypeVar("T")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""It warns about each tensor that is gathered along two mesh dimensions in sequence, which cannot be avoided."""
BUCKET_BYTES = 64 << 20
"""Size of whole parameters, in the engines' type, that are gathered at a time."""


class MemoryShortage(Exception):
    """This rank ran out of memory while others wait for it: all ranks have to start again with smaller micro-batches.

    Args:
        tokens: token budget of micro-batches after the restart.
    """

    def __init__(self, tokens: int, reason: str) -> None:
        super().__init__(reason)
        self.tokens = tokens


class RankMicroBatchBudget(MicroBatchBudget):
    """A `MicroBatchBudget` that does not retry: the other ranks are in the middle of the same collective operations."""

    def fit(self, work: Callable[[], T], lengths: Sequence[int]) -> T:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            self.shrink(min(lengths, default=1), reason)
            raise MemoryShortage(self.tokens, reason) from None


class ShardedLearner(LocalLearner):
    """One rank's part of the learner. All ranks call its methods together, in the same order.

    Args:
        model: a Hugging Face causal LM, whole and equal on all ranks.
        directory: the run's directory on the leader; None on the other ranks.
    """

    computes_together: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        ranks: Ranks,
        tokenizer: Any = None,
        directory: Path | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self.ranks = ranks
        self._offload = settings.cpu_offload
        self._generates = shares_process(settings.engine, settings.cluster_dtype)
        self._copy: Any = None
        self._exported: Tensor | None = None
        self._share: Sharing = share_memory
        self.parts = stored_parts(model)
        super().__init__(model, settings, tokenizer, directory, images)
        self.memory = RankMicroBatchBudget(settings.training.max_tokens_per_micro_batch)
        self.device = ranks.device

    def _place(self) -> None:
        if self.ranks.context and not self.packs:
            raise ConfigError(
                f"trainer.context_parallel: {type(self.model).__name__} does not compute of packed sequences what it "
                "computes of each alone, and packed ones alone can be shared by ranks: leave context_parallel out"
            )
        # Copied now, while the model is whole: `_divide` shards it in place.
        if self._generates:
            self._copy = self.adapters.merged_model() if self.adapters else copy.deepcopy(self.model)
            convert(self._copy.requires_grad_(False).to(self.ranks.device), self.dtype)
        self._divide()

    def _master_weights(self) -> MasterWeights:
        """Return no master weights: FSDP2 keeps float32 shards and casts when it gathers them."""
        return MasterWeights()

    def _divide(self) -> None:
        """Shard the models."""
        for module in (self.policy, self.reference, self.critic):
            if module is not None:
                shard(module, self.ranks, self.dtype, self._offload)

    def _weight_transfer(self, directory: Path) -> None:
        """Return no transfer: the distributed learner has it."""

    @property
    def served(self) -> Any:
        """This rank's whole copy of the policy, updated by `refresh`."""
        return self._copy

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        """Move parts back to the device; the engine's copy, which `refresh` fills again, makes room for parameters."""
        if self._copy is not None and Part.PARAMETERS in parts and Part.PARAMETERS in self.offload.away:
            discard(self._copy.parameters())
        super().to_device(parts)

    def refresh(self) -> None:
        """Update the copy with which this rank's engine computes."""
        allocate(self._copy.parameters())
        own = dict(self._copy.named_parameters()) | dict(self._copy.named_buffers())
        for names in self.buckets():
            for name, tensor in self.gather(names):
                own[name].data.copy_(tensor)

    def buckets(self, most: int = BUCKET_BYTES) -> Iterator[list[str]]:
        """Yield the names for calls of `gather`, in buckets of at most `most` bytes in the engines' type."""
        held, bucket = 0, list[str]()
        for name, count in self._counts():
            size = count * self.dtype.itemsize
            if bucket and held + size > most:
                yield bucket
                held, bucket = 0, []
            bucket.append(name)
            held += size
        yield bucket

    def _counts(self) -> Iterator[tuple[str, int]]:
        """Yield each name for `gather` and its number of elements."""
        return ((name, tensor.numel()) for name, tensor in stored_tensors(self.model).items())

    @torch.no_grad()
    def gather(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return whole tensors on every rank, parameters cast to the engines' type before they are gathered."""
        sources = stored_sources(self.model, self.adapters, self._readable)
        kept = stored_buffers(self.model)
        casts = {name: kept[name].dtype if name in kept else self.dtype for name in names}
        return [(name, whole(sources[name]().to(self.ranks.device, dtype))) for name, dtype in casts.items()]

    @torch.no_grad()
    def export(self, names: Sequence[str]) -> Exported:
        """Gather parameters and share them, packed on every rank's GPU, with servers there, in place of the last ones.

        The memory of the last ones is used again once the servers have released it.
        """
        self.release_export()
        tensors = by_width(cut(self.gather(names), self.parts))
        self._exported = packed_on(self.ranks.device, (tensor for _, tensor in tensors))
        handles = self.ranks.gathered(self._share(self._exported))
        return Exported(bucket_of(tensors), {gpu: handle for own in handles for gpu, handle in own.items()})

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes that all processes together hold of each rank's GPU, by its UUID; empty on CPUs."""
        own: dict[str, int] = {}
        if self.device.type == "cuda":
            own[str(torch.cuda.get_device_properties(self.device).uuid)] = held_bytes(self.device)
        return {gpu: held for each in self.ranks.gathered(own) for gpu, held in each.items()}

    def release_export(self) -> None:
        """Let go of the memory that was shared last."""
        self._exported = None
        collect(self.ranks.device)

    def _passes(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        team, teams = self.ranks.team
        planned = shares(batch.lengths, rows, self.memory.tokens, attends_packed(self.model), teams)
        for parts in zip(*planned, strict=True):
            if self._interrupted.is_set():
                raise Interrupted
            part = parts[team]
            micro = batch.rows(part, self.device) if part else self._nothing(batch)
            if self.replay is not None and batch.routes is not None:
                micro = replace(micro, routes=exchanged(self.ranks, self.replay, batch, parts))
            yield part, micro

    def _nothing(self, batch: Batch) -> Batch:
        """Return an empty micro-batch, for a pass in which this rank only takes part in the collective operations."""
        # FSDP2 gathers parameters in a pass, so every rank has to make one. The shortest row costs least.
        shortest = min(range(len(batch)), key=batch.lengths.__getitem__)
        empty = batch.rows([shortest], self.device)
        empty.mask.zero_()
        return empty

    @torch.no_grad()
    def _score(self, score: Callable[[Batch], Tensor], batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
        own = super()._score(score, batch, rows)
        scores = self.ranks.sum(own if self.ranks.counts else torch.zeros_like(own))
        self._reshard()
        return scores

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores = super().token_logprobs(sequences)
        self._reshard()
        return scores

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        self._reshard()
        super().to_host(parts)

    def _reshard(self) -> None:
        """Free gathered parameters: FSDP2 keeps the root's after a forward pass without a backward pass."""
        for module in (self.policy, self.reference, self.critic):
            if isinstance(module, FSDPModule):
                module.reshard()

    def _adamw(self, module: Any) -> torch.optim.AdamW:
        optimizer = super()._adamw(module)
        (group,) = optimizer.param_groups
        by_mesh: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        # Fused operations on lists of tensors need all of them on one mesh.
        optimizer.param_groups[:] = [{**group, "params": parameters} for parameters in by_mesh.values()]
        return optimizer

    @torch.no_grad()
    def _clip_gradient(self, module: Any) -> float:
        """Clip by the norm over all meshes; torch's `clip_grad_norm_` needs all parameters on one mesh."""
        gradients: list[Any] = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in gradients:
            own = torch.linalg.vector_norm(gradient.to_local()).to(squares) ** 2
            # world / pieces ranks hold each shard, and each of them adds it to the sum.
            squares += own * pieces(gradient) / self.ranks.world
        norm = float(self.ranks.sum(squares).sqrt())
        # 1e-6 as in torch's clip_grad_norm_.
        scale = min(self.settings.training.max_grad_norm / (norm + 1e-6), 1.0)
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm

    def gradient(self, batch: Batch) -> UpdateSums:
        own = super().gradient(batch)
        return self.ranks.total(own if self.ranks.counts else UpdateSums())

    def _updated_share(self) -> float | None:
        return self.update_share.take(self.ranks.sum)

    @contextmanager
    def packed(self) -> Iterator[None]:
        with super().packed(), context_parallel(self.ranks.context):
            yield

    def save(self, directory: Path) -> None:
        """Write the policy in transformers' format and the state of training; each rank writes its rows."""
        if self.ranks.leads:
            describe_policy(directory, self.model, self.tokenizer)
            (directory / TRAINING).mkdir(exist_ok=True)
        self.ranks.wait()
        self._write_policy(directory)
        if self.adapters:
            self.adapters.save(directory / ADAPTER, self.ranks.leads)
        self.save_state(directory, self.ranks.rank)
        # A checkpoint's files are complete once every rank has written; the leader seals them afterwards.
        self.ranks.wait()

    def save_weights(self, directory: Path) -> None:
        """Write the policy in the engines' type."""
        if self.ranks.leads:
            directory.mkdir(parents=True, exist_ok=True)
            describe_policy(directory, self.model, self.tokenizer, self.dtype)
        self.ranks.wait()
        self._write_policy(directory, self.dtype)
        self.ranks.wait()

    def save_adapters(self, directory: Path) -> None:
        """Write only the adapters, for engines that merge them."""
        assert self.adapters is not None, "checked with the recipe"
        self.adapters.save(directory, self.ranks.leads)
        self.ranks.wait()

    def _write_policy(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        write_policy(directory, self.model, self.parts, self.adapters, self._readable, self.ranks.rank, dtype)


def shard(module: nn.Module, ranks: Ranks, dtype: torch.dtype, offload: bool = False) -> None:
    """Shard a model over the ranks, layer by layer, in place. Gradients are summed over teams, not averaged.

    Args:
        dtype: compute type of forward and backward passes; gradients are reduced in the parameters' type.
        offload: keep shards, gradients and optimizer state in CPU memory.
    """
    own = next(module.parameters()).dtype
    mixed = MixedPrecisionPolicy(dtype, own, cast_forward_inputs=False) if dtype != own else MixedPrecisionPolicy()
    place = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy()
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    experts = divide(next(part for part in module.modules() if isinstance(part, PreTrainedModel)), ranks)
    of_layers = ranks.tensor.across if ranks.tensor else ranks.mesh
    of_experts = ranks.expert.across if ranks.expert else ranks.mesh
    # Inner modules first: FSDP2 assigns to a module the parameters that no inner module has taken.
    # The last number is the factor by which the sum over ranks exceeds the gradient; see `context_parallel`.
    placed = [
        *((part, of_experts, ranks.context_size) for part in experts),
        *((part, of_layers, ranks.context_size if ranks.tensor else ranks.team_size) for part in layers),
        (module, ranks.mesh, ranks.team_size),
    ]
    for part, mesh, times in placed:
        sharded: Any = fully_shard(part, mesh=mesh, mp_policy=mixed, offload_policy=place)
        sharded.set_gradient_divide_factor(float(times))
        # In a mesh of one rank FSDP does not reduce, and would divide twice.
        sharded.set_force_sum_reduction_for_comms(mesh.size(mesh.ndim - 1) > 1)


def whole(tensor: Tensor) -> Tensor:
    """Gather all rows of a tensor; every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pieces(tensor: Tensor) -> int:
    """Return the number of shards of a tensor on its mesh."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for place, size in sizes if not place.is_replicate())
