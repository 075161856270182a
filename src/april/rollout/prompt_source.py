"""The source of new groups.

Invariant: an admitted prompt is not admitted again, also across restarts if the prompts can save their position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

from april.rollout.events import Admitted
from april.rollout.json_types import json_types, shown
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.tokens import checked_ids
from april.rollout.user_code.user_code import UserCode


class ResumablePrompts(Protocol):
    """Prompts that can save their position, in a task, a dataset, a dataloader or a queue of requests."""

    def __iter__(self) -> Iterator[Prompt]: ...

    def state_dict(self) -> Any:
        """Return the position, as JSON types."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue at a position, with the next iterator."""
        ...


def _resumable(prompts: Iterable[Prompt]) -> TypeGuard[ResumablePrompts]:
    """Whether prompts can save their position. `isinstance` with a protocol overlooks methods that `__getattr__` gives.

    Raises:
        ValueError: they have one of the two methods only.
    """
    names = ("state_dict", "load_state_dict")
    missing = [name for name in names if not hasattr(prompts, name)]
    if len(missing) == 1:
        owner = type(prompts).__name__
        raise ValueError(f"prompts that save their position need {' and '.join(names)}: {owner} has no {missing[0]}")
    return not missing


class PromptReader(Iterator[Prompt]):
    """Reads prompts in their order, and keeps their position if they are `ResumablePrompts`."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.prompts = prompts
        self._resumable = prompts if _resumable(prompts) else None
        self._next = iter(prompts)

    def __next__(self) -> Prompt:
        return next(self._next)

    @property
    def position(self) -> Any:
        """Position in the prompts, as JSON types; None if they cannot save it."""
        return None if self._resumable is None else self._resumable.state_dict()

    def go_to(self, position: Any) -> None:
        """Continue after `position`, if it is not None."""
        if position is not None:
            assert self._resumable is not None, "these prompts have saved a position"
            self._resumable.load_state_dict(position)
            # An iterator that was made before may continue at its old position.
            self._next = iter(self.prompts)


class PromptSource:
    """Prompts in their order, with the sampling settings of their groups.

    Args:
        prompts: their position is saved if they are `ResumablePrompts`.
        n_samples: samples of each prompt.
        sampling: sampling parameters and the response budget.
        seed: seed of the run, from which the seed of every sample follows.
        journalled: store the position after each admission in its event.
    """

    def __init__(
        self, prompts: Iterable[Prompt], n_samples: int, sampling: SamplingParams, seed: int, journalled: bool
    ) -> None:
        self._reader = PromptReader(prompts)
        self.n_samples = n_samples
        self.sampling = sampling
        self.seed = seed
        self.journalled = journalled

    def admit(self, group_id: int) -> Admitted | None:
        """Return the admission of the next group; None if the prompts ran out.

        Raises:
            ValueError: the next item is no prompt, its tokens are no token ids, or its metadata cannot be saved.
        """
        with UserCode():
            prompt = next(self._reader, None)
        if prompt is None:
            return None
        prompt, position = _checked(prompt), None
        if self.journalled:
            prompt, position = prompt.sealed(), json_types(self.position, "the position of the prompts")
        return Admitted(group_id, prompt, self.n_samples, self.sampling, self.seed, position)

    @property
    def position(self) -> Any:
        """See `PromptReader`."""
        return self._reader.position

    def go_to(self, position: Any) -> None:
        """See `PromptReader`."""
        self._reader.go_to(position)


def _checked(prompt: Any) -> Prompt:
    """Return the prompt with its token ids, any sequence of integers, as a tuple of int."""
    if not isinstance(prompt, Prompt):
        raise ValueError(f"prompts must be april.Prompt objects, not {shown(prompt)}")
    try:
        token_ids = checked_ids(prompt.token_ids)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from None
    return replace(prompt, token_ids=tuple(token_ids))
