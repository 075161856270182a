"""The numbers that a setting may be, said in its type: `Positive[int]`, `NotNegative[float] | None`.

Invariant: a float is finite unless its type is one of the unbounded ones, where inf stands for no bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Range:
    """Numbers from `least` on.

    Args:
        rule: what a number outside of it is told.
        least: the least number.
        without: whether `least` itself is left out.
        infinite: whether inf is a value, and stands for no bound.
    """

    rule: str
    least: float = -math.inf
    without: bool = False
    infinite: bool = False

    def problem(self, value: float) -> str | None:
        """What is wrong with the number, if anything."""
        if isinstance(value, float) and not (math.isfinite(value) or (self.infinite and value == math.inf)):
            return "must be a finite number"
        outside = value <= self.least if self.without else value < self.least
        return self.rule if outside else None


FINITE = Range("must be a finite number")
Positive = Annotated[Number, Range("must be positive", 0, without=True)]
NotNegative = Annotated[Number, Range("must not be negative", 0)]
PositiveUnbounded = Annotated[Number, Range("must be positive (inf is no bound)", 0, without=True, infinite=True)]
NotNegativeUnbounded = Annotated[Number, Range("must not be negative (inf is no bound)", 0, infinite=True)]


def out_of_range(section: Any) -> Iterator[tuple[str, str]]:
    """Name and rule of each number of a settings dataclass that is outside its range."""
    hints = get_type_hints(type(section), include_extras=True)
    for setting in dataclasses.fields(section):
        value = getattr(section, setting.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            range = next(_ranges(hints[setting.name]), FINITE)
            if problem := range.problem(value):
                yield setting.name, problem


def _ranges(hint: Any) -> Iterator[Range]:
    """The ranges in a type, those of its alternatives included."""
    if get_origin(hint) is Annotated:
        yield from (part for part in hint.__metadata__ if isinstance(part, Range))
    else:
        for part in get_args(hint):
            yield from _ranges(part)
