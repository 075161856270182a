"""Sampled tokens as engines hand them out: which are accepted, and how they are kept."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

MOST_TOKEN_ID = 2**31 - 1
MOST_LOGPROB = 1e-3
"""Log-probabilities above 0 by more than this are no rounding error."""


def is_plain(token_id: Any, logprob: Any) -> bool:
    """Whether a token needs no conversion and breaks no rule: `checked_tokens` without a copy."""
    own = token_id.__class__ is int and logprob.__class__ is float
    return own and 0 <= token_id <= MOST_TOKEN_ID and -inf < logprob <= MOST_LOGPROB


def checked_tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[array[int], array[float]]:
    """Token ids and log-probabilities, given as any sequences of numbers, as packed arrays.

    Raises:
        ValueError: a token id is negative or no 31-bit integer, or a log-probability is above 0 or not finite.
    """
    try:
        ids, drawn = array("i", token_ids), array("d", logprobs)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be 31-bit integers, and log-probabilities numbers: {error}") from None
    if len(ids) != len(token_ids):
        raise ValueError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")
    if ids and min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative")
    if not isfinite(sum(drawn)):
        raise ValueError(f"a log-probability is no finite number: {list(drawn)}")
    if drawn and max(drawn) > MOST_LOGPROB:
        raise ValueError(f"a log-probability is {max(drawn):g}, above 0")
    return ids, drawn
