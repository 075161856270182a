"""What the training loop asks of whoever trains the policy.

The loop knows no model. One process on one device (`local.LocalLearner`) fits behind this, and so do many ranks whose
first one answers here and leads the others: what a call returns or raises is decided for all of them.

Invariants every learner keeps:
- `train` is one optimizer phase: it changes the policy by the step's updates, or raises and leaves it as it was before
  the update that failed;
- nothing else changes the policy, so weights, files and state of one moment belong together;
- its methods are called one at a time, from any thread, and only while nothing is in flight in an engine that runs on
  the parameters that are trained; `interrupt` alone may come at any moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from april.rollout.batch import RolloutBatch


class Interrupted(Exception):
    """`train` was given up between two micro-batches; the parameters are as they were before that update."""


class Learner(Protocol):
    @property
    def context_length(self) -> int | None:
        """Prompt and response tokens of one sample together that the model allows; None if it sets no limit."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a response: the model's end-of-sequence tokens and the tokenizer's."""
        ...

    @property
    def served(self) -> Any:
        """A model that an engine in this process can run, and that follows the policy as `weights` says."""
        ...

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        """Train on the groups of a rollout step and return the step's metrics.

        Args:
            number: the training step, counted from 1.

        Raises:
            TrainingError: too many updates in a row had no finite loss and gradient, or memory runs out with one
                sample at a time.
            Interrupted: `interrupt` was called.
        """
        ...

    def interrupt(self) -> None:
        """Let a `train` that is under way in another thread end at its next micro-batch, and every later one."""
        ...

    def weights(self, version: int) -> Any:
        """What the engine is handed to go over to the policy as it is now, called `version`."""
        ...

    def save(self, directory: Path) -> None:
        """Write the policy into `directory` as transformers loads it, and beside it all else that training changed."""
        ...

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote; the policy itself was loaded from there already.

        Raises:
            CheckpointError: it cannot be read.
            ValueError: it is of a run with other settings.
        """
        ...
