"""Protocol between the training loop and its backends.

The loop knows no model. `local.LocalLearner` trains in one process on one device;
`distributed_learner.DistributedLearner` is rank 0 of many, and each of its calls is carried out by all ranks.

Invariants of every learner:
- `train` is one optimizer phase: it applies the step's updates, or raises and leaves the policy as it was before the
  update that failed;
- no other method changes the policy, so weights, files and state of one moment belong together;
- methods are called one at a time, from any thread, and only while no sample is in flight in an engine that computes
  with the trained parameters; `interrupt` may be called at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from april.rollout.batch import RolloutBatch
from april.training.offload import EVERY_PART, Part


class Interrupted(Exception):
    """`train` was interrupted between two micro-batches; the parameters are as before that update."""


class Learner(Protocol):
    @property
    def context_length(self) -> int | None:
        """Maximum number of prompt and response tokens of a sample; None if the model sets no limit."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a response: the end-of-sequence tokens of the model and of the tokenizer."""
        ...

    @property
    def left_out(self) -> Sequence[str]:
        """Tensors of the model's files that the policy has no parameter for: engines are never sent them."""
        ...

    @property
    def served(self) -> Any:
        """Model for an engine in this process; `weights` updates it."""
        ...

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        """Train on the groups of a rollout step and return the step's metrics.

        Args:
            number: number of the training step, from 1.

        Raises:
            TrainingError: too many updates in a row had no finite loss and gradient, or one sample at a time does not
                fit into memory.
            Interrupted: `interrupt` was called.
        """
        ...

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability in nats of each token after the first, by sequence, at temperature 1 without
        truncation. All sequences have the same length."""
        ...

    def interrupt(self) -> None:
        """End a `train` that runs in another thread at its next micro-batch, and every later call."""
        ...

    def weights(self, version: int) -> Any:
        """Return the argument for the engine's `update_weights`: the current policy, as version `version`."""
        ...

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        """Move parts of the trainer's memory to host memory, and return their device memory to the driver.

        `save`, and readers of what `weights` returned, work as before; `train` and `load` need every part on the
        device.

        Raises:
            TrainingError: host memory runs out.
        """
        ...

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        """Move parts that are in host memory back to the device."""
        ...

    def save(self, directory: Path) -> None:
        """Write the policy into `directory` in transformers' format, and all other state that training changes."""
        ...

    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote; the policy itself was loaded before.

        Raises:
            CheckpointError: the state cannot be read.
            ValueError: it belongs to a run with other settings.
        """
        ...
