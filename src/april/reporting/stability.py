"""Notices that the policy moves too far in an update for data as stale as it has.

Both thresholds are from `benchmarks/accuracy/remedies.md`: of the runs with partial rollouts there, those at three
times the best learning rate came below the one and above the other, those at the best rate did not. The first alone
would not do: a response's ratio is a product over its tokens, so that long responses have small effective sample sizes
at any rate.

Invariant: it says so once, and once more only after it has been well in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

LEAST_ESS = 0.85
"""Effective sample size of an update, the mean over `STEPS`."""
MOST_KL = 0.002
"""KL to the behaviour policy in nats per token, the mean over `STEPS`."""
STEPS = 3


class StabilityWatch:
    """Reads a run's metrics as its steps end."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._warned = False

    def observe(self, record: Mapping[str, Any]) -> str | None:
        """What there is to say about the run after another step; None if there is nothing, or nothing new.

        Args:
            record: the step's metrics; without `ess` and `kl_behaviour` there is never anything.
        """
        if record.get("ess") is None or record.get("kl_behaviour") is None:
            return None
        self._latest.append((record["ess"], record["kl_behaviour"], record.get("grad_norm", 0.0)))
        ess, kl, grad_norm = (sum(values) / len(values) for values in zip(*self._latest, strict=True))
        before, self._warned = self._warned, len(self._latest) == STEPS and ess < LEAST_ESS and kl > MOST_KL
        if before or not self._warned:
            return None
        return (
            f"the policy moves too far for data this stale: over {STEPS} steps the effective sample size is {ess:.2f} "
            f"(below {LEAST_ESS}), the KL to the behaviour policy {kl:.4f} nats per token (above {MOST_KL}), the "
            f"gradient norm {grad_norm:.2f}; lower training.learning_rate, to a third for a start, or "
            "rollout.over_sampling_batch_size"
        )
