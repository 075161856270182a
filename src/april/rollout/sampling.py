"""Sampling parameters, and reasons why a response ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from april.rollout.stop_strings import checked_stop_strings


class FinishReason(StrEnum):
    STOP = "stop"
    """The policy ended the response itself: its last token is a stop token, or completes a stop string."""
    LENGTH = "length"
    """The response budget ran out or, in a sample without environment, the engine's context: the sample is
    truncated."""
    CONTEXT = "context"
    """The engine's context has no room left for an episode: it is truncated."""
    TURNS = "turns"
    """An episode reached its limit of turns: it is truncated."""
    DEADLINE = "deadline"
    """An episode's environment reached its time limit: the episode is truncated."""
    DONE = "done"
    """The environment ended the episode."""
    BRIDGE = "bridge"
    """The chat template cannot append the environment's answer to the turn without changing earlier tokens."""
    FAILED = "failed"
    """The environment failed, and the settings end such episodes."""

    @property
    def truncated(self) -> bool:
        """Whether a budget ended the sample, neither the policy nor the environment."""
        return self in _TRUNCATED


_TRUNCATED = frozenset({FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TURNS, FinishReason.DEADLINE})


COLDEST = 0.01
"""Lowest temperature that is not 0: vLLM raises lower ones to this, and SGLang may treat them as 0."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a response.

    The recorded log-probability belongs to the distribution that the token was drawn from: softmax(logits /
    temperature), renormalised over the tokens that `top_k`, `top_p` and `min_p` keep. At `temperature=0` (greedy) it is
    log softmax(logits).

    Args:
        max_tokens: response budget of a sample, in tokens, over all its segments and interruptions.
        temperature: 0 is greedy; otherwise at least `COLDEST`.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; 1 keeps all.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        min_p: keep tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
        stop_token_ids: the first of these tokens ends the sample, or the turn of an episode. Without any, engines in
            this process use the model's end-of-sequence tokens; servers use none.
        stop: texts at which the sample ends, or the turn of an episode, as `stop_strings.py` states it. The scheduler
            then needs a `decode`.
        max_turns: turns of an episode with an environment; 0: no environment, the sample ends with its turn.
        observations_count: whether the answers of an environment to turns count towards `max_tokens` as well.
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_turns: int = 0
    observations_count: bool = False

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        require(self.max_tokens >= 1, "max_tokens", "a response needs a budget of at least one token")
        allowed = self.temperature == 0 or self.temperature >= COLDEST
        require(allowed, "temperature", f"must be 0 (greedy) or at least {COLDEST:g}: servers raise lower ones")
        require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]; 1 keeps every token")
        require(self.top_k >= 0, "top_k", "must be 0 (keep every token) or positive")
        require(0 <= self.min_p < 1, "min_p", "must lie in [0, 1); 0 keeps every token")
        try:
            object.__setattr__(self, "stop", checked_stop_strings(self.stop))
        except ValueError as error:
            raise ValueError(f"stop = {error}") from None
        require(self.max_turns >= 0, "max_turns", "must be 0 (no environment) or positive")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON types; `from_dict` restores them."""
        return {name: getattr(self, name) for name in SamplingParams.__slots__}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SamplingParams:
        lists = {name: tuple(state.get(name, ())) for name in ("stop_token_ids", "stop")}
        return cls(**{**state, **lists})
