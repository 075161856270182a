"""The prompts of a recipe's run, which are tried before anything expensive starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.rollout.trajectory import Prompt
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.tasks.task import BadRecords, Task
from april.training.environment_setup import EnvironmentSetup, prompt_encoder
from april.training.held_out_evaluation import held_out

log = logging.getLogger(__name__)

FEW = 32
"""Held-out prompts below which an evaluation is rough."""


def room_for_prompt(recipe: Recipe, context: int) -> int:
    """Return the tokens that a context leaves for a prompt beside a full response.

    Raises:
        ConfigError: it leaves none.
    """
    room = context - recipe.rollout.max_response_length
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_length = {recipe.rollout.max_response_length} leaves no room for a prompt in a "
            f"context of {context} tokens: lower it, or raise engine.context_length if the model allows"
        )
    return room


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """Prompts to train and to evaluate on; prompts that cannot be used stop the run or are left out.

    Raises:
        ConfigError: prompts cannot be used.
    """

    recipe: Recipe
    task: Task
    encoder: Encoder

    @classmethod
    def of(cls, recipe: Recipe, task: Task, tokenizer: Any, world: EnvironmentSetup | None) -> RunPrompts:
        return cls(recipe, task, prompt_encoder(recipe, tokenizer, world))

    def to_train_on(self, limit: int | None) -> PromptStream:
        bad, overlong = self._policies
        stream = PromptStream(self.task, self.encoder, self.recipe.training.seed, limit, bad, overlong)
        with _blaming_the_task():
            stream.inspect()
        return stream

    def held_out(self, limit: int | None) -> list[Prompt]:
        with _blaming_the_task():
            prompts = held_out(self.task, self.encoder, limit, *self._policies)
        if self.recipe.task.eval_size is None and 0 < len(prompts) < FEW:
            log.warning(
                "few prompts are held out to evaluate on (%d of %d): accuracy and held-out reward are rough; set "
                "task.eval_path, or task.eval_size",
                len(prompts),
                len(self.task) + self.task.eval_size,
            )
        return prompts

    @property
    def _policies(self) -> tuple[BadRecords, BadRecords]:
        """Treatment of bad records, and of prompts that are too long, which `max_prompt_length` leaves out."""
        bad = self.recipe.task.bad_records
        return bad, bad if self.recipe.rollout.max_prompt_length is None else "skip"


@contextmanager
def _blaming_the_task() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
