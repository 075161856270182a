"""Tokens of the simulated engine, of which only the number is known: zeros in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import Any

from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import Segment


class Blank(Sequence[int]):
    """`size` blank tokens, or their log-probabilities."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.size)

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self.size)[index]
        return 0 if isinstance(chosen, int) else blank(len(chosen))


blank = cache(Blank)


class BlankSegment(Segment):
    """A segment of blank tokens, which stores only their number."""

    __slots__ = ("size",)

    def __init__(self, version: int, size: int) -> None:
        self.version = version
        self.size = size

    @property
    def token_ids(self) -> Any:  # type: ignore[override]
        return blank(self.size)

    @property
    def logprobs(self) -> Any:  # type: ignore[override]
        return blank(self.size)

    def __len__(self) -> int:
        return self.size


class BlankSample(Sample):
    """A sample that counts blank tokens, as the simulated engine hands them out, without storing or checking them."""

    __slots__ = ()

    def extend(self, token_ids: Any, logprobs: Any, version: int, finish: FinishReason | None = None) -> int:
        """Append blank tokens, equal in number to `token_ids`."""
        count: int = token_ids.size
        # The first comparison is a cheap bound, as in `Sample.extend`.
        if count > self.sampling.max_tokens - self.length and count > self.budget_left:
            raise ValueError(f"{count} tokens came where the response budget leaves {self.budget_left}")
        if count:
            segments: list[Any] = self.segments
            if segments and (last := segments[-1]).version == version:
                last.size += count
            else:
                segments.append(BlankSegment(version, count))
            self.length += count
        if finish is not None:
            self.end(finish)
        return count
