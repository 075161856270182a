"""State of a run between two steps, saved and loaded together.

Invariant: policy, optimizer, unfinished groups, journal position and log in a checkpoint are of the same moment. The
caller therefore calls `capture` while no sample is in flight, and neither trains nor logs until `write` has returned;
tokens sampled in the meantime are in the journal after the checkpoint's position.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.images.kept import KeptImages
from april.reporting.run_log import RunLog
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import segments_of
from april.rollout.scheduler import RolloutScheduler
from april.training.checkpoint import STATE, checkpoints, load_mark, load_state, save_checkpoint
from april.training.learner import Learner


@dataclass(frozen=True, slots=True)
class RunState:
    """Saves a run's checkpoints.

    Args:
        directory: folder of the checkpoints.
        keep: number of checkpoints to keep.
        settings: the run's recipe as JSON types, without secrets.
        images: images of episodes; None for a run without episodes.
    """

    directory: Path
    keep: int
    settings: dict[str, Any]
    learner: Learner
    scheduler: RolloutScheduler
    journal: Journal
    log: RunLog
    images: KeptImages | None = None

    def capture(self) -> dict[str, Any]:
        """Return the state without the learner's part, as `save_checkpoint` takes it."""
        # A resumed run has no KV cache: without one here, too, both runs compute the same.
        self.scheduler.engine.forget()
        # Log lines reach the disk before the checkpoint: a resumed run cuts later lines, but cannot restore lost ones.
        self.log.sync()
        return {
            "rollout": self.scheduler.state_dict(),
            "log": self.log.state_dict(),
            "recipe": self.settings,
        }

    def write(self, captured: dict[str, Any]) -> Path:
        """Write the checkpoint of the captured moment. This takes long and may run in any thread."""
        return save_checkpoint(self.directory, captured["log"]["steps"], self.learner.save, captured, self.keep)

    def prune(self) -> None:
        """Delete journal records from before the oldest checkpoint."""
        if oldest := load_mark(checkpoints(self.directory)[0]):
            self.journal.prune(oldest["position"])

    def prune_images(self) -> None:
        """Delete images of episodes that no checkpoint and no later event names. This may take long, in any thread."""
        if self.images is not None:
            states = [checkpoint / STATE for checkpoint in checkpoints(self.directory)]
            self.images.prune([*states, *segments_of(self.journal.path)])


def load(checkpoint: Path, learner: Learner | None, scheduler: RolloutScheduler) -> dict[str, Any]:
    """Restore learner and scheduler from the checkpoint and return the state of the log.

    Args:
        learner: None if it was restored before.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ValueError: it belongs to a run with other settings.
    """
    state = load_state(checkpoint)
    if learner is not None:
        learner.load(checkpoint)
    scheduler.load_state_dict(state["rollout"])
    log: dict[str, Any] = state["log"]
    return log
