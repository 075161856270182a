"""Rewards for brevity, weighted together with a reward for the content of a response."""

from __future__ import annotations

from collections.abc import Sequence


def per_thousand(response: str, answer: str | None, length: int) -> float:
    """-1 for every thousand tokens: the weight is the price of them."""
    return -length / 1000


def relative(responses: Sequence[str], answer: str | None, lengths: Sequence[int]) -> list[float]:
    """From 0.5 for the shortest response of a group to -0.5 for the longest; 0 if all are of one length.

    The first half of the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), which gives wrong responses no
    more than 0; here right and wrong ones are treated alike, and the reward for the content distinguishes them.
    """
    shortest, longest = min(lengths), max(lengths)
    span = longest - shortest
    return [0.5 - (length - shortest) / span if span else 0.0 for length in lengths]


relative.reward_scope = "group"  # type: ignore[attr-defined]


def repetition(response: str) -> float:
    """Minus the share of its runs of four words that occurred before in it, -1 to 0."""
    words = response.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(runs)) / len(runs) - 1 if runs else 0.0
