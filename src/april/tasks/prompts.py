"""The order in which prompts are trained on.

Invariants:
- every epoch gives each problem exactly once, in an order that follows from (seed, epoch) alone;
- a stream restored from its state goes on with exactly the prompts that the saved one would have given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from april.rollout.trajectory import Prompt
from april.tasks.task import ChatTemplate, Task, encode

logger = logging.getLogger(__name__)


class PromptStream(Iterator[Prompt]):
    """The encoded prompts of a task's training problems, epoch after epoch, without end.

    Args:
        task: where the problems come from.
        tokenizer: see `encode`.
        seed: of the order.
        chat_template: see `encode`.
        max_prompt_length: tokens a prompt may have; None for no limit.
        overlong_prompts: what a longer one means. "filter": it is passed over, counted in `filtered`, and the first is
            named in a warning. "error": ValueError.
        template_arguments: see `encode`.

    Attributes:
        epoch: how often every problem was given.
        position: problems of this epoch that were given or passed over.
        filtered: overlong prompts passed over so far; each counts once per epoch.

    Raises:
        ValueError: a prompt cannot be encoded or is too long; the message names the problem. With "filter", only when
            none of an epoch's prompts is short enough.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        seed: int = 0,
        chat_template: ChatTemplate = "auto",
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["filter", "error"] = "filter",
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"max_prompt_length = {max_prompt_length}: must be at least 1, or None for no limit")
        if overlong_prompts not in ("filter", "error"):
            raise ValueError(f'overlong_prompts = {overlong_prompts!r}: must be "filter" or "error"')
        self.task = task
        self.tokenizer = tokenizer
        self.seed = seed
        self.chat_template = chat_template
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.template_arguments = template_arguments
        self.epoch = 0
        self.position = 0
        self.filtered = 0
        self._order = self._permutation()

    def _permutation(self) -> NDArray[np.int64]:
        bits = np.random.Philox(np.random.SeedSequence((self.seed, self.epoch)))
        return np.random.Generator(bits).permutation(len(self.task))

    def __next__(self) -> Prompt:
        for _ in range(2 * len(self.task)):  # enough for the rest of this epoch and all of the next
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
            problem = self.task.problem(int(self._order[self.position]))
            prompt = encode(problem, self.tokenizer, self.chat_template, self.template_arguments)
            if self._fits(prompt):
                self.position += 1
                return prompt
            self.position += 1
            self.filtered += 1
        raise ValueError(f"max_prompt_length = {self.max_prompt_length}: every prompt of {self.task.name} is longer")

    def _fits(self, prompt: Prompt) -> bool:
        length = len(prompt.token_ids)
        if self.max_prompt_length is None or length <= self.max_prompt_length:
            return True
        if self.overlong_prompts == "error":
            raise ValueError(
                f"problem {prompt.id!r} has a prompt of {length} tokens, max_prompt_length = {self.max_prompt_length}: "
                'raise it, or set overlong_prompts = "filter"'
            )
        if not self.filtered:
            logger.warning(
                "prompts of more than max_prompt_length = %d tokens are passed over; the first is %r with %d",
                self.max_prompt_length,
                prompt.id,
                length,
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON types."""
        return {
            "task": self.task.name,
            "size": len(self.task),
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "filtered": self.filtered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the stream that `state` was taken from stood.

        Raises:
            ValueError: that stream had another task, size or seed.
        """
        for name, value in (("task", self.task.name), ("size", len(self.task)), ("seed", self.seed)):
            if state[name] != value:
                raise ValueError(
                    f"the saved prompt order is of {name} {state[name]!r}, but the settings say {value!r}; resume with "
                    "the settings of the saved run"
                )
        self.epoch, self.position, self.filtered = state["epoch"], state["position"], state["filtered"]
        self._order = self._permutation()
