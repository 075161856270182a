"""How much of its GPUs' peak training reaches, where the peak is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from april.config.settings import ModelSettings
from april.engines.devices import DeviceMap
from april.rollout.batch import RolloutBatch
from april.training.memory_plan import active_parameters

PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "mi300x": 1307e12}
"""FLOP/s in dense bfloat16 by the vendors' data sheets, of the SXM, HGX and OAM modules."""
SMALLER = re.compile(r"pcie|nvl", re.IGNORECASE)
"""In the names of cards of the same generation with another peak."""
TRAINING = 6
"""FLOP for each parameter and token of a forward and a backward pass."""


def peak_of(name: str) -> float | None:
    """Return the peak of a GPU by the name that its driver reports, in FLOP/s; None if it is not known."""
    if SMALLER.search(name):
        return None
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((PEAKS[word] for word in words if word in PEAKS), None)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Of the GPUs that train.

    Args:
        parameters: those that a token is multiplied with.
        peak: FLOP/s of all GPUs that train.
    """

    parameters: int
    peak: float

    def of(self, step: RolloutBatch, seconds: float) -> dict[str, float]:
        """Metrics of a training step: `mfu` counts 6 FLOP for each parameter and token of prompts and responses, once;
        neither attention nor passes that are repeated are in it."""
        samples = [sample for group in step.groups for sample in group.samples]
        tokens = sum(len(sample.prompt_ids) + sample.length for sample in samples)
        rate = tokens / seconds if seconds > 0 else 0.0
        return {"trained_tokens_per_second": rate, "mfu": TRAINING * self.parameters * rate / self.peak}


def build_utilisation(model: ModelSettings, devices: DeviceMap | None) -> Utilisation | None:
    """Return what `mfu` needs; None where a GPU that trains is not known, or none trains."""
    peaks = [peak_of(gpu.name) for gpu in devices.training] if devices else []
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return None
    return Utilisation(active_parameters(model), sum(known))
