"""OpenRLHF's DeepSpeed actors on machines without a GPU: every call of CUDA that stops them.

DeepSpeed itself, ZeRO included, runs on a CPU, over gloo, without the two parts that it would compile first: the
kernel of its Adam, and its shared memory for collective operations.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.optim.adamw import adamw


class CPU(str):
    """The current device. OpenRLHF makes the name of a device of CUDA from it, too, which it does not use here."""

    def __format__(self, spec: str) -> str:
        return "0"


class Adam:
    """Builds the kernel of DeepSpeed's FusedAdam: torch's."""

    def load(self) -> Adam:
        return self

    @torch.no_grad()
    def multi_tensor_adam(
        self,
        chunk_size: int,
        overflow: Any,
        tensors: list[list[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        decoupled: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        assert decoupled
        assert bias_correction
        grads, params, means, squares = tensors
        steps = [torch.tensor(step - 1.0) for _ in params]
        rest = {"amsgrad": False, "maximize": False, "beta1": beta1, "beta2": beta2, "eps": eps}
        adamw(params, grads, means, squares, [], steps, lr=lr, weight_decay=weight_decay, **rest)


def install() -> None:
    """Replace the calls, before OpenRLHF is imported."""
    fused_adam: Any = importlib.import_module("deepspeed.ops.adam.fused_adam")
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    mesh = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.device_mesh.init_device_mesh = lambda device, *args, **kwargs: mesh("cpu", *args, **kwargs)
    torch.cuda.current_device = lambda: CPU("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: None
    fused_adam.FusedAdamBuilder = Adam
    communication.build_shm_op = lambda: None
