"""The file that april adds to TRL's checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from april.disk import write_whole
from april.integrations.state_format import check_format, with_format

logger = logging.getLogger(__name__)


STATE = "april.json"
"""File of the rollout buffer in a checkpoint of TRL."""


FORMAT = 2


class Checkpoint(TrainerCallback):
    """Adds the rollout buffer to each checkpoint that TRL writes.

    Args:
        rollouts: has `state_dict`.
    """

    def __init__(self, rollouts: Any) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_whole(checkpoint / STATE, json.dumps(with_format(FORMAT, **self.rollouts.state_dict())))


def read_state(resume_from_checkpoint: str | bool | None, output_dir: Any) -> Mapping[str, Any] | None:
    """Return the state in the checkpoint that TRL resumes from, or None if there is none."""
    checkpoint = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    if not checkpoint:
        return None
    path = Path(checkpoint) / STATE
    if not path.exists():
        logger.warning("%s contains no %s: training resumes without rollouts in flight", path.parent, STATE)
        return None
    return check_format(json.loads(path.read_text()), FORMAT, path)


def resume_hint(directory: Path, event: str) -> str:
    """Return one line for the user: what happened, and how to resume."""
    saved = sorted(directory.glob(f"checkpoint-*/{STATE}"), key=lambda path: int(path.parent.name.split("-")[1]))
    hint = (
        f'start the job again with trainer.train(resume_from_checkpoint="{saved[-1].parent}")'
        if saved
        else "nothing was saved yet: start the job again from the beginning, and set save_steps lower"
    )
    return f"april: {event}: {hint}"
