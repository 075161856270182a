"""Fields of a request's JSON body, read with errors in the APIs' own words.

Invariant: whatever the body contains, reading ends with a value of the expected type or with a `RequestError` that
names the field.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from april.gateway.request_errors import RequestError
from april.rollout.episodes.environment import Message
from april.rollout.stop_strings import checked_stop_strings

log = logging.getLogger(__name__)

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
"""Names of functions that the APIs accept."""
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
"""Types of JSON Schema."""
MOST_LINES = 256
"""Lines about fields without effect in a run."""
DATA = frozenset({"default", "const", "enum", "examples"})
"""Keywords of JSON Schema whose values are data."""
MOST_STOPS = 16
"""Stop strings of a request; OpenAI's API takes 4, and servers such as vLLM any number."""
LONGEST_STOP = 256
"""Characters of a stop string: the text behind each token is searched for it."""
DEPTH = 32
"""Nesting of a tool's schema that is still checked."""


def plain_message(item: Any) -> Message | None:
    """Return a message that is a role and a text and nothing else, as most are; None for any other."""
    if type(item) is dict and len(item) == 2:
        role, content = item.get("role"), item.get("content")
        if type(content) is str and (role == "user" or role == "system" or role == "assistant"):
            return {"role": role, "content": content}
    return None


def text_of(content: Any, param: str) -> str:
    """Return the content of a message, text or a list of text parts, as one text.

    Raises:
        RequestError: the content contains anything but text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"Invalid type for '{param}': expected a string or a list of parts.", param=param)
    return "".join(part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def part_text(part: Any, param: str) -> str:
    """Return the text of a part of a message.

    Raises:
        RequestError: it is an image, audio or a file, or has no text.
    """
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(
        f"Invalid content part at '{param}': it takes no part of type {kind!r}: the policy takes text there, and in "
        "messages of users and tools also images.",
        code="invalid_value",
        param=param,
    )


def whole(body: Mapping[str, Any], name: str, least: int) -> int | None:
    """Return a field that holds an integer; None if the field is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"Invalid '{name}': expected an integer >= {least}, got {short(value)}.", param=name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"Invalid type for '{name}': expected a boolean, got {short(value)}.", param=name)
    return bool(value)


def number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """Return a field that holds a number; None if the field is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        expected = f"a number from {least:g} to {most:g}"
        raise RequestError(f"Invalid '{name}': expected {expected}, got {short(value)}.", param=name)
    return float(value)


def texts(body: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return a field that holds stop strings: a text, or a list of texts.

    Raises:
        RequestError: there are too many, or one is none.
    """
    given = body.get(name)
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise RequestError(f"Invalid '{name}': expected a string, or a list of at most {MOST_STOPS}.", param=name)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise RequestError(
                f"Invalid '{name}': expected strings of 1 to {LONGEST_STOP} characters, got {short(stop)}.", param=name
            )
    try:
        return checked_stop_strings(stops)
    except ValueError as error:
        raise RequestError(f"Invalid '{name}': {error}.", param=name) from None


def items(value: Any, param: str) -> Sequence[Any]:
    """Return a field that holds a list."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"Invalid type for '{param}': expected a list of objects.", param=param)
    return value


def records(value: Any, param: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a list with the name of each."""
    for index, item in enumerate(items(value, param)):
        if not isinstance(item, Mapping):
            raise RequestError(f"Invalid type for '{param}[{index}]': expected an object.", param=f"{param}[{index}]")
        yield f"{param}[{index}]", item


def tool(name: Any, description: Any, parameters: Any, param: str, longest: int = 64) -> dict[str, Any]:
    """Return a function in the form of the Chat Completions API.

    Args:
        longest: characters that the API allows in its name.

    Raises:
        RequestError: the name is none, or the parameters are no JSON schema of an object.
    """
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or len(name) > longest:
        raise RequestError(
            f"Invalid '{param}.name': expected up to {longest} letters, digits, '_' or '-', got {short(name)}.",
            param=param,
        )
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    problem = _schema_problem(schema, "parameters", DEPTH)
    if problem is None and not isinstance(schema, Mapping):
        problem = "parameters must be an object"
    if problem is None and (schema.get("type") or "object") != "object":
        problem = 'parameters.type must be "object"'
    if problem is not None:
        raise RequestError(
            f"Invalid schema for function '{name}': {problem}.", code="invalid_function_parameters", param=param
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"Invalid '{param}.description': expected a string.", param=param)
    given = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **given, "parameters": _without_null(schema)}}


def _without_null(schema: Any) -> Any:
    """Return a schema without keywords that are null, over which chat templates would iterate; values that the schema
    gives as data stay."""
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: value for key, value in schema.items() if value is not None or key in DATA}
    if isinstance(children := plain.get("properties"), Mapping):
        plain["properties"] = {name: _without_null(child) for name, child in children.items()}
    if "items" in plain:
        plain["items"] = _without_null(plain["items"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in plain:
            plain[key] = [_without_null(part) for part in plain[key]]
    return plain


def _schema_problem(schema: Any, where: str, depth: int) -> str | None:
    """Return the first fault of a JSON schema in the parts that chat templates read."""
    if not isinstance(schema, Mapping):
        return None if isinstance(schema, bool) else f"{where} must be an object, got {short(schema)}"
    if depth == 0:
        return f"{where} is nested too deeply"
    schema = {key: value for key, value in schema.items() if value is not None}
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else [None]:
        if not isinstance(kind, str) or kind not in TYPES:
            return f"{where}.type is no type of JSON Schema: {short(kinds)}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return f"{where}.required must be a list of strings"
    children = schema.get("properties", {})
    if not isinstance(children, Mapping):
        return f"{where}.properties must be an object"
    nested = [(f"{where}.properties.{key}", child) for key, child in children.items()]
    if "items" in schema and not isinstance(schema["items"], list):
        nested.append((f"{where}.items", schema["items"]))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key, [])
        if not isinstance(parts, list):
            return f"{where}.{key} must be a list"
        nested += [(f"{where}.{key}[{index}]", child) for index, child in enumerate(parts)]
    return next((found for at, child in nested if (found := _schema_problem(child, at, depth - 1))), None)


def functions(given: Any, param: str) -> tuple[list[tuple[str, Mapping[str, Any]]], list[str]]:
    """Return the tools of a list that are functions, with the name of each, and the types of the others, which the
    policy is not offered: clients such as Codex always name the tools of their own provider.

    Raises:
        RequestError: there are tools, and none is a function.
    """
    found = list(records(given or (), param))
    taken = [(where, item) for where, item in found if item.get("type") in ("function", None)]
    others = [short(item.get("type")) for _, item in found if item.get("type") not in ("function", None)]
    if found and not taken:
        raise RequestError(
            f"Invalid '{param}': the policy takes tools of the type \"function\" only, not {others[0]}.",
            code="invalid_value",
            param=param,
        )
    return taken, others


class Ignored:
    """Settings and tools of requests that have no effect; each is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Sequence[str], tools: Sequence[str] = ()) -> None:
        for name in names:
            self._once(f"requests of programs set {name[:60]}, which has no effect: the recipe decides")
        for kind in tools:
            self._once(f"requests of programs offer tools of the type {kind}, which the policy does not get")

    def _once(self, line: str) -> None:
        if line not in self._logged and len(self._logged) < MOST_LINES:
            self._logged.add(line)
            log.warning("%s", line)


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"
