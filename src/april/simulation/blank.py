"""Tokens of which only the number is known, as the simulated engine hands them out: zeros in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, cast

from april.rollout.trajectory import Segment


class BlankSegment(Segment):
    """A segment of blank tokens: one `Blank` stands for its tokens and their log-probabilities alike."""

    __slots__ = ()

    def __init__(self, version: int) -> None:
        self.version = version
        self.token_ids = self.logprobs = cast(Any, Blank())

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        own: Any = self.token_ids
        own.size += len(token_ids)


class Blank(Sequence[int]):
    """`size` blank tokens, or their log-probabilities."""

    __slots__ = ("size",)
    segment = BlankSegment

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.size)

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self.size)[index]
        return 0 if isinstance(chosen, int) else Blank(len(chosen))
