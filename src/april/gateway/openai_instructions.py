"""Requirements of OpenAI's requests that act through the prompt: the choice of a tool, and the format of the answer.

The distribution is never masked: training would not know the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from april.gateway.fields import short
from april.gateway.request import choice_instruction, schema_instruction
from april.gateway.request_errors import RequestError


def tool_choice(choice: Any, function: Any, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the text of a request's `tool_choice`.

    Args:
        function: the part of an object `choice` that has the function's name.

    Raises:
        RequestError: no tool of the request is meant.
    """
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise RequestError("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
        return choice_instruction(choice) if tools else []
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in [one["function"]["name"] for one in tools]:
        raise RequestError(f"Invalid 'tool_choice': {short(choice)} names none of 'tools'.", param="tool_choice")
    return choice_instruction(None, name)


def answer_format(form: Any, described: Any, param: str) -> list[str]:
    """Return the text of a request's format of answers.

    Args:
        described: the part of `form` that has the schema, if its type is `json_schema`.
        param: the field of the request.

    Raises:
        RequestError: the format is none of text, json_object and json_schema.
    """
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return []
    if kind == "json_object":
        return schema_instruction(None)
    schema = described.get("schema") if kind == "json_schema" and isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"Invalid '{param}': {short(form)}. The policy takes text, json_object and json_schema, which act through "
            "the prompt; guided decoding is refused.",
            param=param,
        )
    return schema_instruction(schema)
