"""The context of a run's samples, and the room that it leaves for prompts."""

from __future__ import annotations

from typing import Any

from april.config.error import ConfigError
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.rollout_settings import RolloutSettings


def context_of(config: Any) -> int | None:
    """Return the number of tokens that a model's configuration allows; None if it sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def room_for_prompt(max_response_length: int, context: int) -> int:
    """Return the number of tokens that a context has for a prompt besides a full response.

    Raises:
        ConfigError: it has none.
    """
    room = context - max_response_length
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_length = {max_response_length} leaves no room for a prompt in a "
            f"context of {context} tokens: lower it, or raise engine.context_length if the model allows"
        )
    return room


def prompt_limit(rollout: RolloutSettings, engine: EngineSettings, known: int | None) -> int | None:
    """Return the maximum number of prompt tokens: the context minus a full response, or less if the recipe limits it.

    Args:
        known: the model's own context; see `context_of`.

    Raises:
        ConfigError: the context is longer than the model's, or leaves no room for a prompt.
    """
    asked = engine.context_length
    if asked and known and asked > known and engine.engine == "embedded":
        raise ConfigError(f"engine.context_length = {asked}, but the model was configured for {known}: lower it")
    context = asked or known
    if context is None:
        return rollout.max_prompt_length
    room = room_for_prompt(rollout.max_response_length, context)
    return min(rollout.max_prompt_length or room, room)
