"""AdamW: its state is allocated when it is made, and can be read before the first update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from april.config.settings.training_settings import TrainingSettings

FUSED = ("cpu", "cuda")
"""Devices on which PyTorch has a fused AdamW, which updates in place, without a copy of the parameters."""


def adamw(parameters: Sequence[Tensor], settings: TrainingSettings, device: torch.device) -> torch.optim.AdamW:
    """Return an AdamW of learning rate 0.

    Its moments are allocated now, so that an engine that sizes its KV cache leaves them their memory.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=device.type in FUSED
    )
    for parameter in parameters:
        moments(optimizer, parameter)
    return optimizer


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter, also before its first update."""
    if not optimizer.state[parameter]:
        moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0, device=parameter.device), **moments}
    found: dict[str, Tensor] = optimizer.state[parameter]
    return found


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for parameters in optimizer.param_groups:
        parameters["lr"] = lr
