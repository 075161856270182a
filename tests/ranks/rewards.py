"""A reward that a random policy earns some of."""

from __future__ import annotations


def even_characters(response: str) -> float:
    return sum(ord(character) % 2 == 0 for character in response) / max(len(response), 1)
