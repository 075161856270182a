"""Prompts of a run, checked before anything expensive starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from april.config.error import ConfigError
from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.tasks.task import BadRecords, Task
from april.training.held_out_evaluation import held_out

log = logging.getLogger(__name__)

FEW = 32
"""Held-out prompts below which an evaluation is rough."""


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """Prompts to train on and to evaluate on.

    Args:
        task: source of the problems.
        encoder: encodes problems as prompts.
        seed: seed of the order of training prompts.
        bad_records: treatment of unusable records.
        overlong: treatment of overlong prompts.
        eval_size_set: whether the user has chosen the number of held-out prompts.

    Raises:
        ConfigError: a prompt cannot be used, and `bad_records` or `overlong` is "raise".
    """

    task: Task
    encoder: Encoder
    seed: int
    bad_records: BadRecords
    overlong: BadRecords
    eval_size_set: bool

    def to_train_on(self, limit: int | None) -> PromptStream:
        stream = PromptStream(self.task, self.encoder, self.seed, limit, self.bad_records, self.overlong)
        with _blaming_the_task():
            stream.inspect()
        return stream

    def held_out(self, limit: int | None) -> list[Prompt]:
        with _blaming_the_task():
            prompts = held_out(self.task, self.encoder, limit, self.bad_records, self.overlong)
        if not self.eval_size_set and 0 < len(prompts) < FEW:
            log.warning(
                "few prompts are held out to evaluate on (%d of %d): accuracy and held-out reward are rough; set "
                "task.eval_path, or task.eval_size",
                len(prompts),
                len(self.task) + self.task.eval_size,
            )
        return prompts


@contextmanager
def _blaming_the_task() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
