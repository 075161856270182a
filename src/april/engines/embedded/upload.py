"""Copies to the device for which the host does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to `device`, from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
