"""Choice of the renderer for a tokenizer.

The template reader comes first: it works for every template that keeps earlier turns, needs no package, and agrees with
the renderers of the package where both apply (`benchmarks/rendering_agreement.json`). A family's renderer takes the
templates that the reader refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from april.extras import install_command
from april.rendering.conversation import ConversationRenderer, TemplateError
from april.rendering.model_family import PROBE_TOOL, family_of
from april.rendering.template_reader import TemplateReader

log = logging.getLogger(__name__)


def program_renderer(
    tokenizer: Any, stop_token_ids: Sequence[int] = (), arguments: Mapping[str, Any] | None = None
) -> ConversationRenderer:
    """Return the renderer for programs, whose requests bring their tools: one that reads calls, if there is one.

    Raises:
        TemplateError: see `renderer_of`.
    """
    try:
        return renderer_of(tokenizer, stop_token_ids, [PROBE_TOOL], arguments)
    except TemplateError as error:
        renderer = renderer_of(tokenizer, stop_token_ids, (), arguments)
        log.warning("requests of programs that offer tools are refused: %s", error)
        return renderer


def renderer_of(
    tokenizer: Any,
    stop_token_ids: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> ConversationRenderer:
    """Return the renderer for a tokenizer with a chat template.

    Args:
        tokenizer: Hugging Face tokenizer.
        stop_token_ids: tokens with which the policy may end a turn.
        tools: tools that are offered, if they are known; their calls must then be readable.
        arguments: further arguments of the chat template.

    Raises:
        TemplateError: no renderer can extend conversations of this template; the message is the reader's reason.
    """
    try:
        reader = TemplateReader(tokenizer, stop_token_ids, arguments)
        if tools:
            reader.check_tools(tools)
        return reader
    except TemplateError as error:
        reason = str(error)
    try:
        family = family_of(tokenizer, stop_token_ids, bool(tools), arguments)
    except ModuleNotFoundError as missing:
        raise TemplateError(
            f"{reason}; the package {missing.name} is missing, which may know this model family: "
            f"{install_command('agents')}"
        ) from None
    if family is None:
        raise TemplateError(f"{reason}; no model family of the package renderers has this template")
    return family
