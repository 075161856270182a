"""Ranges of settings, as part of their types: `Positive[int]`, `NotNegative[float] | None`, `Seconds`.

Invariants:
- a float is finite unless its type is an unbounded one, where inf means no bound;
- an integer fits into 64 bits, and a finite float into 32;
- a duration is no longer than a year, so every timer of the operating system and of Python can wait that long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Number = TypeVar("Number", int, float)
LARGEST_INTEGER = 2**63 - 1
LARGEST_FLOAT = 3.4e38
YEAR_SECONDS = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`.

    Args:
        rule: error message for a number outside the range.
        least: smallest number.
        most: largest number.
        without: whether `least` itself is outside the range.
        infinite: whether inf is allowed and means no bound.
    """

    rule: str
    least: float = -math.inf
    most: float = math.inf
    without: bool = False
    infinite: bool = False

    def problem(self, value: float) -> str | None:
        """Return an error message for a number outside the range, otherwise None."""
        if isinstance(value, float) and not (math.isfinite(value) or (self.infinite and value == math.inf)):
            return "must be a finite number"
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            return "must fit into 64 bits"
        if LARGEST_FLOAT < abs(value) < math.inf:
            return "must fit into a float of 32 bits"
        outside = value <= self.least if self.without else value < self.least
        return self.rule if outside or value > self.most else None


FINITE = Range("must be a finite number")
Positive = Annotated[Number, Range("must be positive", 0, without=True)]
NotNegative = Annotated[Number, Range("must not be negative", 0)]
PositiveUnbounded = Annotated[Number, Range("must be positive (inf is no bound)", 0, without=True, infinite=True)]
NotNegativeUnbounded = Annotated[Number, Range("must not be negative (inf is no bound)", 0, infinite=True)]
Processes = Annotated[int, Range("must be from 1 to 4,096", 1, 4096)]
ProcessesOrNone = Annotated[int, Range("must be from 0 to 4,096", 0, 4096)]
Share = Annotated[float, Range("must be a share above 0, at most 1", 0, 1, without=True)]
Discount = Annotated[float, Range("must lie in [0, 1]", 0, 1)]
Gigabytes = Annotated[float, Range("must be positive gigabytes, a million at most", 0, 1e6, without=True)]
Seconds = Annotated[float, Range("must be positive seconds, a year at most", 0, YEAR_SECONDS, without=True)]
SecondsOrZero = Annotated[float, Range("must be seconds from 0 to a year", 0, YEAR_SECONDS)]


def out_of_range(section: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the error message of each setting of a dataclass that is outside its range."""
    hints = get_type_hints(type(section), include_extras=True)
    for setting in dataclasses.fields(section):
        value = getattr(section, setting.name)
        range = next(_ranges(hints[setting.name]), FINITE)
        problems = (range.problem(number) for number in _numbers(value))
        if problem := next(filter(None, problems), None):
            yield setting.name, problem


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a setting: its value, or the elements of its tuple."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield each


def _ranges(hint: Any) -> Iterator[Range]:
    """Yield the ranges in a type, including the members of a union."""
    if get_origin(hint) is Annotated:
        yield from (part for part in hint.__metadata__ if isinstance(part, Range))
    else:
        for part in get_args(hint):
            yield from _ranges(part)


def range_problems(section: str, values: Any) -> Iterator[str]:
    """Yield a line for each setting of a section that is out of its range."""
    for name, rule in out_of_range(values):
        yield f"{section}.{name} = {getattr(values, name)}: {rule}"
