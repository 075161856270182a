"""What a run is between two steps, saved and loaded as one.

Invariant: policy, optimizer, groups under way, the place in the journal and the log in a checkpoint are of the same
moment. So whoever captures it lets nothing be in flight, and whoever writes it lets nothing train or be logged until it
is written; what is sampled meanwhile is in the journal behind the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.reporting.run_log import RunLog
from april.rollout.journal import Journal
from april.rollout.scheduler import RolloutScheduler
from april.training.checkpoint import checkpoints, load_mark, load_state, save_checkpoint
from april.training.learner import Learner


@dataclass(frozen=True, slots=True)
class RunState:
    """Saves a run's checkpoints.

    Args:
        directory: folder of the checkpoints.
        keep: number of checkpoints to keep.
        settings: the run's recipe as JSON types, without secrets.
    """

    directory: Path
    keep: int
    settings: dict[str, Any]
    learner: Learner
    scheduler: RolloutScheduler
    journal: Journal
    log: RunLog

    def capture(self) -> dict[str, Any]:
        """Everything but the learner's part, as JSON types."""
        # A run resumed from here finds no KV cache; dropping it keeps the run that goes on equal to it.
        self.scheduler.engine.forget()
        self.log.sync()
        return {
            "rollout": self.scheduler.state_dict(),
            "log": self.log.state_dict(),
            "recipe": self.settings,
        }

    def write(self, captured: dict[str, Any]) -> Path:
        """Write the checkpoint of the moment in which `captured` was captured; takes long, and goes in any thread."""
        return save_checkpoint(self.directory, captured["log"]["steps"], self.learner.save, captured, self.keep)

    def prune(self) -> None:
        """Leave out of the journal what no checkpoint needs any more."""
        if oldest := load_mark(checkpoints(self.directory)[0]):
            self.journal.prune(oldest["position"])


def load(checkpoint: Path, learner: Learner, scheduler: RolloutScheduler) -> dict[str, Any]:
    """Bring learner and scheduler to the moment of the checkpoint; returns the log's state then.

    Raises:
        CheckpointError: it cannot be read.
        ValueError: it is of a run with other settings.
    """
    state = load_state(checkpoint)
    learner.load(checkpoint)
    scheduler.load_state_dict(state["rollout"])
    log: dict[str, Any] = state["log"]
    return log
