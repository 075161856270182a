"""Positions of prompts of any class that has the two methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from april import Prompt
from april.rollout.prompt_source import PromptReader

PROMPTS = [Prompt((1, i)) for i in range(5)]


class Iterated:
    """Iterated by `__iter__`."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Prompt]:
        while self.place < len(PROMPTS):
            self.place += 1
            yield PROMPTS[self.place - 1]

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class Delegating:
    """Passes all but iteration to another object by `__getattr__`."""

    def __init__(self) -> None:
        self.inner = Iterated()

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Indexed:
    """Iterated by `__getitem__`."""

    place = skipped = 0

    def __getitem__(self, index: int) -> Prompt:
        self.place = self.skipped + index + 1
        return PROMPTS[self.place - 1]

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.skipped = state["place"]


@pytest.mark.parametrize("prompts", [Iterated, Delegating, Indexed])
def test_prompts_that_can_save_their_position_continue_there(prompts: type) -> None:
    first, second = PromptReader(prompts()), PromptReader(prompts())
    assert [next(first), next(first)] == PROMPTS[:2]
    assert first.position == {"place": 2}
    second.go_to(first.position)
    assert list(second) == PROMPTS[2:]


def test_prompts_without_a_position_have_none() -> None:
    assert PromptReader(PROMPTS).position is None
    assert PromptReader(iter(PROMPTS)).position is None


@pytest.mark.parametrize("missing", ["state_dict", "load_state_dict"])
def test_prompts_with_one_of_the_two_methods_are_refused(missing: str) -> None:
    methods = {name: getattr(Iterated, name) for name in ("__iter__", "state_dict", "load_state_dict")}
    del methods[missing]
    with pytest.raises(ValueError, match=f"has no {missing}"):
        PromptReader(type("Halved", (), methods)())
