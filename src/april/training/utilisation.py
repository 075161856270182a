"""Model FLOP utilisation (MFU) of training, on GPUs with a known peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

from april.config.settings.model_settings import ModelSettings
from april.engines.devices import DeviceMap
from april.rollout.batch import RolloutBatch
from april.training.memory_plan import active_parameters

PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "mi300x": 1307e12}
"""FLOP/s in dense bfloat16 by the vendors' data sheets, of the SXM, HGX and OAM modules."""
SMALLER = re.compile(r"pcie|nvl", re.IGNORECASE)
"""Pattern in the names of cards of the same generation with a lower peak."""
TRAINING = 6
"""FLOP per parameter and token of a forward and a backward pass."""


def peak_of(name: str) -> float | None:
    """Return the peak of a GPU by the name that its driver reports, in FLOP/s; None if it is not known."""
    if SMALLER.search(name):
        return None
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((PEAKS[word] for word in words if word in PEAKS), None)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Utilisation of the GPUs that train.

    Args:
        parameters: number of parameters used per token.
        peak: FLOP/s of all GPUs that train together.
    """

    parameters: int
    peak: float

    def of(self, step: RolloutBatch, seconds: float) -> dict[str, float]:
        """Return metrics of a training step. `mfu` counts 6 FLOP per parameter and token of prompts and responses;
        attention and repeated passes are not counted."""
        samples = [sample for group in step.groups for sample in group.samples]
        tokens = sum(len(sample.prompt_ids) + sample.length for sample in samples)
        rate = tokens / seconds if seconds > 0 else 0.0
        return {"trained_tokens_per_second": rate, "mfu": TRAINING * self.parameters * rate / self.peak}


def build_utilisation(model: ModelSettings, devices: DeviceMap | None) -> Utilisation | None:
    """Return the utilisation of the GPUs that train; None without GPUs, or if the peak of one is not known."""
    peaks = [peak_of(gpu.name) for gpu in devices.training] if devices else []
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return None
    return Utilisation(active_parameters(model), sum(known))
