"""Validation and storage of sampled tokens."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROB = 1e-3
"""Largest log-probability that counts as a rounding error of 0."""
# Signs are read from the bytes of all numbers at once, as a loop over the numbers would take most of the time.
LAST_BYTE = sys.byteorder == "little"
INT_SIGNS, DOUBLE_SIGNS = (slice(size - 1 if LAST_BYTE else 0, None, size) for size in (4, 8))
"""Bytes with the sign bits of packed 32-bit integers and 64-bit floats."""
SIGN_SET = bytes(range(128, 256))


def is_plain(token_id: Any, logprob: Any) -> bool:
    """Whether a token is valid and needs no conversion: `checked_tokens` without a copy."""
    own = token_id.__class__ is int and logprob.__class__ is float
    return own and 0 <= token_id <= MAX_TOKEN_ID and -inf < logprob <= MAX_LOGPROB


def checked_ids(token_ids: Sequence[int]) -> array[int]:
    """Return token ids, given as any sequence of integers, as a packed array.

    Raises:
        ValueError: a token id is negative or no 31-bit integer.
    """
    try:
        ids = array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be 31-bit integers: {error}") from None
    # `array` reads bytes as machine values, four bytes for each item, so the lengths differ.
    if len(ids) != len(token_ids):
        raise ValueError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")
    if not ids.tobytes()[INT_SIGNS].isascii():
        raise ValueError(f"token id {min(ids)} is negative")
    return ids


def checked_tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[array[int], array[float]]:
    """Return token ids and log-probabilities, given as any sequences of numbers, as packed arrays.

    Raises:
        ValueError: a token id is negative or no 31-bit integer, or a log-probability is above 0 or not finite.
    """
    ids = checked_ids(token_ids)
    try:
        drawn = array("d", logprobs)
    except TypeError as error:
        raise ValueError(f"log-probabilities must be numbers: {error}") from None
    # One fast pass: a sum with an infinite or NaN term is not finite.
    if not isfinite(sum(drawn)):
        raise ValueError(f"a log-probability is no finite number: {list(drawn)}")
    # `max` takes long, and a response rarely has a log-probability with a clear sign bit.
    if drawn.tobytes()[DOUBLE_SIGNS].translate(None, SIGN_SET) and max(drawn) > MAX_LOGPROB:
        raise ValueError(f"a log-probability is {max(drawn):g}, above 0")
    return ids, drawn
