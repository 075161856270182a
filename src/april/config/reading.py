"""Reading a recipe from TOML.

Invariant: an error names the file, the line, the setting and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from april.config.error import ConfigError
from april.config.paths import anchor
from april.config.recipe import Recipe, typed


def load_recipe(path: Path) -> Recipe:
    """Read a TOML recipe. Relative paths that exist in the recipe's directory become absolute.

    Raises:
        ConfigError: the file is missing or is not TOML, or a key or value is wrong; with line numbers.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error.reason} at byte {error.start}") from None
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits, and arrays nested too deeply
        raise ConfigError(f"{path}: no valid TOML: {error}") from None
    if unknown := list(_unknown(path, text, settings)):
        raise ConfigError("\n".join(unknown))
    try:
        recipe: Recipe = typed(Recipe, settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, text, problems) for problems in _by_setting(error))) from None
    anchor(recipe, path.parent)
    return recipe


def _unknown(path: Path, text: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each unknown section or key, with the most similar known name."""
    keys = {f.name: [k.name for k in dataclasses.fields(getattr(Recipe(), f.name))] for f in dataclasses.fields(Recipe)}
    for section, values in settings.items():
        if section not in keys:
            home = [f"[{name}]" for name, known in keys.items() if section in known]
            hint = f"it belongs into {home[0]}" if home else nearest(section, list(keys))
            yield f"{_where(path, text, [section])}: unknown section or setting {section}; {hint}"
        elif isinstance(values, Mapping):
            for key in set(values) - set(keys[section]):
                home = [f"[{name}]" for name, known in keys.items() if key in known]
                hint = f"it belongs into {home[0]}" if home else nearest(key, keys[section])
                yield f"{_where(path, text, [section, key])}: unknown setting {section}.{key}; {hint}"


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def _by_setting(error: ValidationError) -> list[list[Any]]:
    """Group pydantic's errors by setting: a union gives one error for each of its types."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for problem in error.errors():
        found.setdefault(problem["loc"][:2], []).append(problem)
    return list(found.values())


def messages(problems: list[Any]) -> str:
    """Join pydantic's messages about one value into one line."""
    return "; or: ".join(problem["msg"].removeprefix("Value error, ") for problem in problems)


def _explain(path: Path, text: str, problems: list[Any]) -> str:
    """Return one line for pydantic's errors about a setting: file, line, setting and error."""
    problem = problems[0]
    location = [str(part) for part in (problem["loc"] if len(problems) == 1 else problem["loc"][:2])]
    message = messages(problems)
    if problem["type"] == "value_error":
        return f"{_where(path, text, location)}: {'.'.join(location)}.{message}"
    return f"{_where(path, text, location)}: {'.'.join(location)} = {problem['input']!r}: {message}"


def _where(path: Path, text: str, location: list[str]) -> str:
    line = _line(text, location)
    return f"{path}:{line}" if line else str(path)


def setting_line(path: Path, name: str) -> int | None:
    """Return the line of a recipe that sets `section.key`, counted from 1; None if there is none."""
    return _line(path.read_text(encoding="utf-8-sig"), name.split("."))


def _line(text: str, location: list[str]) -> int | None:
    """Return the line of a recipe with a setting, counted from 1; None if the recipe does not set it."""
    section: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip()
            if [section] == location or section.split(".") == location[:2]:
                return number
        elif (key := re.match(r"\s*([\w-]+)\s*=", line)) and [section, key[1]] == location[:2]:
            return number
    return None
