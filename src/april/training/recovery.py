"""Handling of failed updates: out of memory, and losses or gradients that are not finite.

Invariants:
- work that ran out of memory is repeated as a whole with smaller micro-batches, so no part of it counts twice;
- an update whose loss or gradient is not finite changes no parameter, and its batch is saved for inspection;
- saved batches are safetensors and JSON files, which contain no executable code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from april.algorithms.batch import Batch
from april.engines.device_memory import is_out_of_memory, release_cached
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

T = TypeVar("T")
KEPT = 10
"""Number of skipped updates whose batches stay on disk: the newest ones."""


class TrainingError(Exception):
    """Training cannot continue."""


class MicroBatchBudget:
    """Token budget of micro-batches, halved whenever memory runs out.

    Args:
        tokens: initial budget of a micro-batch, padding included.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.shortages = 0
        """How often memory has run out."""

    def fit(self, work: Callable[[], T], lengths: Sequence[int]) -> T:
        """Return the result of `work`, repeated with smaller budgets while memory runs out.

        Args:
            work: splits rows of these `lengths` into micro-batches of `tokens`.

        Raises:
            TrainingError: memory runs out with one row at a time.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # Outside the handler: the exception holds references to the tensors that fill the memory.
            self.shrink(min(lengths, default=1), reason)

    def shrink(self, shortest: int, reason: str) -> None:
        """Halve the budget.

        Raises:
            TrainingError: micro-batches have one row already; the shortest has `shortest` tokens.
        """
        # No two rows fit into the budget, so every micro-batch has one row already.
        if self.tokens < 2 * shortest:
            raise TrainingError(
                f"memory runs out with one sample at a time ({reason}): set training.gradient_checkpointing, lower "
                "rollout.max_response_length, or leave less memory to the engine (engine.kv_cache_gb)"
            )
        self.tokens //= 2
        self.shortages += 1
        log.warning("memory ran out in training; micro-batches have %d tokens from now on: %s", self.tokens, reason)
        release_cached()


class SkippedUpdates:
    """Counts and records updates that were skipped because their loss or gradient was not finite.

    Args:
        directory: folder for the batches of skipped updates; None saves none.
        limit: number of skipped updates in a row at which training stops.
    """

    def __init__(self, directory: Path | None, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self.in_a_row = 0

    def made(self) -> None:
        """Record that an update was made."""
        self.in_a_row = 0

    def skip(self, name: str, batch: Batch, samples: Sequence[Sample], measured: Mapping[str, float]) -> None:
        """Record a skipped update and save its batch and measurements.

        Raises:
            TrainingError: the limit is reached.
        """
        self.in_a_row += 1
        where = "" if self.directory is None else f"; the batch is in {self._save(name, batch, samples, measured)}"
        found = ", ".join(f"{key} {value:g}" for key, value in measured.items())
        log.warning("update %s is skipped: %s%s", name, found, where)
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{self.in_a_row} updates in a row had no finite loss and gradient (the last: {found}){where}: lower "
                "the learning rate, or look for rewards and log-probabilities that are not plausible"
            )

    def _save(self, name: str, batch: Batch, samples: Sequence[Sample], measured: Mapping[str, float]) -> Path:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name}.safetensors"
        tensors = {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, path)
        # Measurements are written as text, because JSON has neither NaN nor infinity.
        record: dict[str, Any] = {
            "measured": {key: repr(value) for key, value in measured.items()},
            "lengths": batch.lengths,
            "samples": [
                {"id": s.id, "prompt_tokens": len(s.prompt_ids), "tokens": s.length, "reward": s.reward}
                for s in samples
            ],
        }
        path.with_suffix(".json").write_text(json.dumps(record, indent=1))
        # Names contain the step with leading zeros, so their order is the order of time.
        for old in sorted(self.directory.glob("*.safetensors"))[:-KEPT]:
            old.unlink()
            old.with_suffix(".json").unlink(missing_ok=True)
        return path
