"""Episodes of a framework's code whose responses are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.integrations.generating_code import CodeEpisode, DrawnTurn
from april.rollout.episodes.turns import AgentStart


def episode(*turns: DrawnTurn) -> CodeEpisode:
    """An episode with these responses, which draws no others."""
    policy: Any = None
    made = CodeEpisode(policy, AgentStart("april-0.0", {}, 0))
    made.turns.extend(turns)
    return made


def turn(prompt: Sequence[int], *response: int, drawn: Sequence[int] = ()) -> DrawnTurn:
    """A response; each log-probability is of its own prompt and place.

    Args:
        drawn: places of the prompt that earlier responses drew.
    """
    whole = [*prompt, *response]
    mask = [*(place in drawn for place in range(len(prompt))), *[True] * len(response)]
    logprobs = [-float(100 * len(prompt) + place) for place in range(len(response))]
    return DrawnTurn("turn", whole, mask, [*response], logprobs, [0] * len(response), "stop")
