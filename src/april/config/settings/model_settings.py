"""Settings of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ModelSettings:
    """The policy.

    Args:
        path: Hugging Face causal language model: a directory or a hub name.
        dtype: Type of the trained parameters, the gradient sums and the optimizer state. bfloat16 rounds away updates
            at usual learning rates and is refused there.
        compute_dtype: Type of the trainer's forward and backward passes and of generation. With float32 parameters,
            bfloat16 computes on a rounded copy. auto: bfloat16 on GPUs, otherwise the type in dtype.
        device: Device for training and, with the embedded engine, generation: auto, cpu, cuda, cuda:1, …
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"

    @property
    def on_gpu(self) -> bool:
        """Whether the policy is trained on a GPU; `auto` uses one if PyTorch finds any."""
        if self.device != "auto":
            return self.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()
