"""Flags of settings that are tables: `--task.rewards NAME WEIGHT NAME WEIGHT` sets the whole table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

TABLES = ConstructorRegistry()


@TABLES.primitive_rule
def _table(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Mapping[str, Any]] | None:
    if get_origin(info.type) not in (Mapping, dict):
        return None
    _, kind = get_args(info.type)
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME WEIGHT ...]" if kind is float else "[NAME VALUE ...]",
        instance_from_str=lambda words: _pairs(words, float if kind is float else _value),
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda table: [str(word) for word in chain.from_iterable(table.items())],
    )


def _pairs(words: list[str], value_of: Callable[[str], Any]) -> dict[str, Any]:
    if len(words) % 2:
        raise ValueError(f"names and values come in pairs, and {words[-1]!r} has none")
    return {name: value_of(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def _value(word: str) -> Any:
    """Parse a number, true, false, null or list as JSON; anything else is a string."""
    with suppress(ValueError):
        return json.loads(word)
    return word
