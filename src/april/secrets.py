"""Secrets: recognise them among variables and settings, resolve references to them, and remove them from text.

Invariants:
- one rule defines secrets, by name or as a part of an address, for variables and settings alike;
- text that is written or shown passes `redact`, and a recipe that is written passes `redacted`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SECRET = re.compile(
    r"KEY(?!WORD|BOARD)|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|AUTH(?!ORS?([^A-Z]|$))|COOKIE", re.IGNORECASE
)
"""Names of variables and settings whose values are secrets."""
SECRET_VALUE = re.compile(r"(://)[^/@\s]+:[^/@\s]+(?=@)")
"""Addresses with a password."""
SECRET_QUERY = re.compile(r"(?<=[?&])([\w.-]+=)(?!\$\{|\*\*\*)[^&#\s\"'<>\\]+")
"""Parameters of an address."""
REFERENCE = re.compile(r"\$(\$?)\{(\w+)\}")
"""`${NAME}` stands for the environment variable NAME; `$${NAME}` is the text `${NAME}`."""
HIDDEN = "***"
SHORTEST = 8
"""Characters of a variable's value that is looked for in text: shorter ones occur by chance."""


def secrets(environment: Mapping[str, str]) -> list[str]:
    """The variables of an environment that look like secrets."""
    return [name for name, value in environment.items() if SECRET.search(name) or SECRET_VALUE.search(value)]


def without_secrets(environment: Mapping[str, str], keep: Sequence[str] = ()) -> dict[str, str]:
    """The environment without the variables that look like secrets, but for those in `keep`."""
    hidden = set(secrets(environment)) - set(keep)
    return {name: value for name, value in environment.items() if name not in hidden}


def redact(text: str) -> str:
    """The text without passwords and keys in addresses, and without the secrets in this process's environment."""
    if "://" in text:
        text = SECRET_VALUE.sub(rf"\1{HIDDEN}", text)
        text = SECRET_QUERY.sub(lambda found: found[1] + HIDDEN if SECRET.search(found[1]) else found[0], text)
    for name in secrets(os.environ):
        value = os.environ[name]
        if len(value) >= SHORTEST:
            for written in {value, json.dumps(value)[1:-1]}:
                text = text.replace(written, HIDDEN)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """Return settings of JSON types without secrets; references to variables are kept.

    Args:
        name: name of the setting with this `value`.
    """
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(item, name) for item in value)
    if not isinstance(value, str):
        return value
    return HIDDEN if SECRET.search(name) and value and not REFERENCE.search(value) else redact(value)


def resolved(value: Any, environment: Mapping[str, str]) -> Any:
    """Return settings of JSON types with the variables that they refer to filled in.

    Raises:
        KeyError: a variable is not set; its argument is the variable's name.
    """
    return _each_text(value, lambda text: REFERENCE.sub(lambda found: _referred(found, environment), text))


def _referred(found: re.Match[str], environment: Mapping[str, str]) -> str:
    return found[0][1:] if found[1] else environment[found[2]]


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each_text(item, change) for item in value)
    return change(value) if isinstance(value, str) else value


def references(value: Any) -> Iterator[str]:
    """The variables that settings refer to."""
    for _, text in texts(value, ""):
        yield from (name for escaped, name in REFERENCE.findall(text) if not escaped)


def texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text in settings, with the setting's name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item, name)
    elif isinstance(value, str):
        yield name, value
