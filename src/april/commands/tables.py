"""Settings that are tables, as flags: `--task.rewards NAME WEIGHT NAME WEIGHT` stands for the whole table."""

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
    """A number, true, false, null or a list as JSON has them; anything else is text."""
    with suppress(ValueError):
        return json.loads(word)
    return word
