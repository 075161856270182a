"""The answer of an environment, or of a program, to one turn of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Transition:
    """The answer of an environment to one turn, or to the reset that starts an episode.

    `start` and `tokens` give the position of its tokens in the response; the answered turn ends before them.
    """

    start: int
    """Response tokens before the observation."""
    tokens: int
    """Tokens of the observation, with the tokens that the chat template puts around it."""
    reward: float = 0.0
    done: bool = False
    observation: str = ""
    """Fingerprint of the observation."""
    seconds: float = 0.0
    """Seconds that the environment took."""
    failed: bool = False
    """The environment failed, and the observation reports that: the turn has not reached the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None
    """Turns that the program had asked for in its episode before it asked for the next one here; None without a
    program, and where no turn follows."""
    request: Mapping[str, Any] | None = None
    """The program's request for the next turn, as JSON types."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Beginning of a sequence that a program has asked for: the first `shared` tokens of another sequence of the
    episode, prompt and response, or of none."""

    parent: int | None = None
    """Index of the other sample."""
    shared: int = 0
