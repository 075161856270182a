"""How tokens of a response are drawn, and why it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"
    """The policy ended the response itself, with a stop token; the stop token is the last of the response."""
    LENGTH = "length"
    """The response budget ran out, or, of a sample without environment, the engine's context: it is truncated."""
    CONTEXT = "context"
    """An episode has no room left in the engine's context: it is truncated."""
    TURNS = "turns"
    """An episode had all its turns: it is truncated."""
    DEADLINE = "deadline"
    """An episode's environment took all the seconds it may: it is truncated."""
    DONE = "done"
    """The environment ended the episode."""
    BRIDGE = "bridge"
    """What the environment said cannot be put behind the turn token by token."""
    FAILED = "failed"
    """The environment failed, and the run is set to end episodes there."""

    @property
    def truncated(self) -> bool:
        """Whether a budget ended the sample, not the policy nor the environment."""
        return self in _TRUNCATED


_TRUNCATED = frozenset({FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TURNS, FinishReason.DEADLINE})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    The recorded log-probability is that of the distribution the token was drawn from: softmax(logits / temperature),
    renormalised over what `top_k`, `top_p` and `min_p` leave. At `temperature=0` (greedy) it is log softmax(logits).

    Args:
        max_tokens: response budget of a sample, in tokens, over all its segments and interruptions.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; 1 keeps all.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        min_p: keep tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
        stop_token_ids: a sample ends with the first of these that it draws; of an episode, the turn. The
            engines in this process take the model's end-of-sequence tokens where there are none; servers take none.
        max_turns: turns of an episode with an environment; 0: no environment, the sample ends with its turn.
        observations_count: whether what an environment answers to turns counts towards `max_tokens` as well.
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    max_turns: int = 0
    observations_count: bool = False

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        require(self.max_tokens >= 1, "max_tokens", "a response needs a budget of at least one token")
        require(self.temperature >= 0, "temperature", "must be 0 (greedy) or positive")
        require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]; 1 keeps every token")
        require(self.top_k >= 0, "top_k", "must be 0 (keep every token) or positive")
        require(0 <= self.min_p < 1, "min_p", "must lie in [0, 1); 0 keeps every token")
        require(self.max_turns >= 0, "max_turns", "must be 0 (no environment) or positive")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON types; `from_dict` restores them."""
        return {name: getattr(self, name) for name in SamplingParams.__slots__}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SamplingParams:
        return cls(**{**state, "stop_token_ids": tuple(state["stop_token_ids"])})
