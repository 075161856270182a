"""A reward that a random policy earns some of, at once or slowly."""

from __future__ import annotations

import time


def even_characters(response: str) -> float:
    return sum(ord(character) % 2 == 0 for character in response) / max(len(response), 1)


def slowly(response: str) -> float:
    """The same, by a judge who takes a fifth of a second."""
    time.sleep(0.2)
    return even_characters(response)
