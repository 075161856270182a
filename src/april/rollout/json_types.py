"""Values from user code that are saved with a run: checked and copied on arrival.

Invariant: a value that `json_types` returns can be written and read at any later time, independently of later changes
of the original.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

DEEPEST = 100
"""Levels of lists and dicts in one value. Python's readers and writers of JSON fail at about 400, and earlier where the
stack is deep already."""


def json_types(value: Any, name: str) -> Any:
    """Copy `value` as JSON types: text, finite numbers, lists, dicts with text as keys.

    Arrays become lists, and scalars of NumPy and torch become numbers. Text is made `encodable`.

    Args:
        name: name of the value, for the message.

    Raises:
        ValueError: part of the value is of another kind; the message names the part.
    """
    return _copied(value, name, DEEPEST)


def _copied(value: Any, name: str, levels: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, int):
        if abs(value) > sys.float_info.max:
            raise ValueError(f"{name} is an integer beyond the range of floats, and cannot be saved")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, which JSON does not have")
        return float(value)
    if levels == 0:
        raise ValueError(f"{name[:60]}… contains itself, or is nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} has the key {shown(odd[0])}: keys must be text, to be saved")
        return {encodable(key): _copied(item, f"{name}[{key!r}]", levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, f"{name}[{index}]", levels - 1) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _copied(value.tolist(), name, levels)
    raise ValueError(f"{name} is a {type(value).__name__}, which JSON does not have")


def encodable(text: str) -> str:
    """`text` with U+FFFD in place of halves of surrogate pairs, which UTF-8 cannot hold.

    A policy that writes half of an escape in JSON brings them into the text of tools and rewards.
    """
    if text.isascii():
        return str.__add__(text, "")  # the text itself, of a subclass as well
    # UTF-16 joins two halves that form a pair, and `replace` affects lone halves only.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finite_number(value: Any) -> float | None:
    """`value` as a float; None if it is no finite number."""
    try:
        finite = not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two: huge integers, tensors of several
        finite = False
    return float(value) if finite else None


def shown(value: Any) -> str:
    """The value in at most 60 characters, for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
