"""Copies to the device that do not wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to `device`, from pinned memory, so that the host continues at once."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
