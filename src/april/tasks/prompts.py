"""The order in which prompts are trained on.

Invariants:
- every epoch gives each problem that can be a prompt exactly once, in an order that follows from (seed, epoch) alone;
- a stream restored from its state yields exactly the prompts that the saved stream would have yielded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.inspection import GENERATED, LOOK_AHEAD, inspect
from april.tasks.task import BadRecords, Task

logger = logging.getLogger(__name__)


class PromptStream(Iterator[Prompt]):
    """The encoded prompts of a task's training problems, epoch after epoch, without end.

    Args:
        task: source of the problems.
        encoder: makes prompts of them.
        seed: seed of the order.
        max_prompt_length: tokens a prompt may have; None for no limit.
        on_bad_record: treatment of problems that make no prompt.
        on_overlong: treatment of prompts longer than `max_prompt_length`.

    Attributes:
        epoch: how often every problem was given.
        position: problems of this epoch that were given or passed over.
        filtered: problems passed over so far; each counts once per epoch.

    Raises:
        ValueError: a prompt cannot be used and is not to be left out, or none of an epoch's can be used; the message
            names the problem.
    """

    def __init__(
        self,
        task: Task,
        encoder: Encoder,
        seed: int = 0,
        max_prompt_length: int | None = None,
        on_bad_record: BadRecords = "raise",
        on_overlong: BadRecords = "skip",
    ) -> None:
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"max_prompt_length = {max_prompt_length}: must be at least 1, or None for no limit")
        for name, policy in (("on_bad_record", on_bad_record), ("on_overlong", on_overlong)):
            if policy not in ("raise", "skip"):
                raise ValueError(f'{name} = {policy!r}: must be "raise" or "skip"')
        self.task = task
        self.encoder = encoder
        self.seed = seed
        self.max_prompt_length = max_prompt_length
        self.on_bad_record = on_bad_record
        self.on_overlong = on_overlong
        self.epoch = 0
        self.position = 0
        self.filtered = 0
        self._unusable: set[int] = set()
        """Problems known to make no prompt that can be used."""
        self._order = self._permutation()

    @property
    def skipped(self) -> int:
        """Records and prompts left out of the training data, as far as they were tried."""
        return self.task.skipped + len(self._unusable)

    def inspect(self) -> None:
        """Try the problems before they are needed: all of those that are stored, up to `LOOK_AHEAD`.

        Raises:
            ValueError: see the class.
        """
        ahead = self._order[: LOOK_AHEAD if self.task.stored else GENERATED].tolist()
        found = inspect(self.task, "train", ahead, self.encoder, self.max_prompt_length, keep=False)
        self._unusable = found.unusable
        if self.task.stored or len(self._unusable) < found.count:
            found.settle(self.on_bad_record, self.on_overlong)
        else:  # further problems may be usable: generate until one is
            state = self.state_dict()
            next(self)
            self.load_state_dict(state)

    def _permutation(self) -> NDArray[np.int64]:
        bits = np.random.Philox(np.random.SeedSequence((self.seed, self.epoch)))
        return np.random.Generator(bits).permutation(len(self.task))

    def __next__(self) -> Prompt:
        for _ in range(2 * len(self.task)):  # enough for the rest of this epoch and all of the next
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
            prompt = self._prompt(int(self._order[self.position]))
            self.position += 1
            if prompt is not None:
                return prompt
            self.filtered += 1
        raise ValueError(f"no prompt of {self.task.name} can be used: {self._reason()}")

    def _prompt(self, index: int) -> Prompt | None:
        """The prompt of a problem, or None if it is passed over."""
        if index in self._unusable:
            return None
        found = inspect(self.task, "train", [index], self.encoder, self.max_prompt_length)
        for reasons, policy in ((found.bad, self.on_bad_record), (found.overlong, self.on_overlong)):
            if index in reasons and policy == "raise":
                raise ValueError(f'{reasons[index]}; task.on_bad_record = "skip" leaves such prompts out')
            if index in reasons and not self._unusable:
                logger.warning("prompts that cannot be used are left out; the first: %s", reasons[index])
        self._unusable |= found.unusable
        return found.prompts.get(index)

    def _reason(self) -> str:
        found = inspect(self.task, "train", self._order[:1].tolist(), self.encoder, self.max_prompt_length)
        return next(iter((found.bad | found.overlong).values()))

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
        """Continue at the position of the stream that `state` was taken from.

        Raises:
            ValueError: that stream had another task, size or seed.
        """
        check_position(state, self.task, self.seed)
        self.epoch, self.position, self.filtered = state["epoch"], state["position"], state["filtered"]
        self._order = self._permutation()


def check_position(state: Mapping[str, Any], task: Task, seed: int) -> None:
    """Refuse the position of a stream of other prompts.

    Raises:
        ValueError: that stream had another task, size or seed.
    """
    for name, value in (("task", task.name), ("size", len(task)), ("seed", seed)):
        if state[name] != value:
            raise ValueError(
                f"the saved prompt order is of {name} {state[name]!r}, but the settings say {value!r}; resume with "
                "the settings of the saved run"
            )
