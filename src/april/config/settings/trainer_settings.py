"""Settings of the training processes and their parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    NotNegative,
    Positive,
    Processes,
    Seconds,
)


@dataclass(kw_only=True)
class TrainerSettings:
    """Training processes and their parallelism.

    Args:
        backend: local: one process on one device. fsdp2: ranks that each hold a shard of parameters, gradients and
            optimizer state (PyTorch FSDP2). megatron: ranks that compute the policy with Megatron-Core, which the
            environment must have. auto: local with one process, fsdp2 with more.
        processes: Training processes (ranks), which april starts on this machine, or on nodes of a cluster
            (cluster.ranks); with GPUs, one GPU each.
        overlap: Overlap generation with training: generation stops only for the weight update, and max_staleness still
            holds. Needs engines on devices of their own: servers, or engine.own_process. Off: generation and training
            alternate. auto: on where possible.
        layout: Devices of engine and trainer. split: each has its own, except engines in the trainer's process. shared:
            both use the same GPUs in turn; the engine releases its memory while the trainer trains, and the trainer
            moves its state to host memory while the engine generates.
        policy_replicas: fsdp2: Copies of the sharded policy (HSDP): each copy is sharded over processes /
            policy_replicas ranks, and only gradients are reduced between copies.
        context_parallel: fsdp2: Ranks that share each sequence in training, for long responses: each computes a part of
            the tokens. Must divide processes, attention heads and key-value heads.
        tensor_parallel: fsdp2, megatron: Ranks that share the matrices of each layer, split by heads and columns. fsdp2
            uses transformers' plan for the architecture and shards each part over the remaining ranks. Its product with
            context_parallel must divide processes, attention heads and key-value heads.
        expert_parallel: fsdp2: Ranks that share the experts of a mixture of experts by whole experts and exchange
            tokens. Must be a multiple of tensor_parallel and divide the number of experts and the ranks of each policy
            copy.
        cpu_offload: fsdp2: Keep parameters, gradients and optimizer state in host memory and update them there; a layer
            is on the GPU while it computes.
        rank_timeout: Time limit in seconds for a collective operation and for the heartbeat of a rank. After it all
            ranks are restarted from the newest checkpoint and the journal.
        max_restarts: Restarts of the ranks without a completed training step between them, before the run ends.
    """

    backend: Literal["auto", "local", "fsdp2", "megatron"] = "auto"
    processes: Processes = 1
    overlap: bool | Literal["auto"] = False
    layout: Literal["split", "shared"] = "split"
    policy_replicas: Positive[int] = 1
    context_parallel: Positive[int] = 1
    tensor_parallel: Positive[int] = 1
    expert_parallel: Positive[int] = 1
    cpu_offload: bool = False
    rank_timeout: Seconds = 300.0
    max_restarts: NotNegative[int] = 3

    @property
    def backend_name(self) -> str:
        """Backend, with `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "fsdp2" if self.processes > 1 else "local"

    @property
    def sharded(self) -> bool:
        """Whether the backend trains with ranks, even if there is only one."""
        return self.backend_name in ("fsdp2", "megatron")
