"""Stop strings: texts at which a response, or a turn of an episode, ends.

Invariants:
- a turn ends with the first token with which the text of its tokens contains a stop string. That depends on the turn's
  tokens alone: interrupts, crashes, and the chunks in which an engine returns tokens change nothing;
- the turn keeps all of its tokens as they were drawn. The last one may contain text behind the stop string;
- the text is what the tokens decode to, special tokens and thinking included, without the stop token at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""

MARGIN = 8
"""Characters at the beginning of a decoded window that may differ from the whole text: a part of a character, or a
space that a tokenizer drops at the beginning."""
SLACK = 32
"""Characters by which a window grows before it is cut: each cut decodes the rest."""
UNKNOWN = "\ufffd"
"""Decodes from a part of a character."""


class Stop(NamedTuple):
    """Occurrence of a stop string in a text."""

    at: int
    """Characters before it."""
    string: str


def checked_stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    """Return stop strings as a tuple.

    Raises:
        ValueError: one is empty, or contains U+FFFD, which stands for a part of a character.
    """
    if isinstance(stops, str):
        raise ValueError(f"{stops!r}: give a list of texts")
    for stop in stops:
        if not isinstance(stop, str) or not stop or UNKNOWN in stop:
            raise ValueError(f"{stop!r}: a stop string is a text of at least one character, without U+FFFD")
    return tuple(stops)


def first_stop(text: str, stops: Sequence[str]) -> Stop | None:
    """Return the stop string that occurs first in a text; of two at one place, the one that is named first."""
    found = [Stop(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, key=lambda stop: stop.at, default=None)


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the end of the stop string that occurs first in it."""
    stop = first_stop(text, stops)
    return text if stop is None else text[: stop.at + len(stop.string)]


def stop_of(
    decode: Decode, turn_ids: Sequence[int], stops: Sequence[str], stop_token_ids: Collection[int]
) -> Stop | None:
    """Return the stop string that ended a turn; None if none did."""
    return first_stop(decode(before_stop_token(turn_ids, stop_token_ids)), stops)


def before_stop_token(turn_ids: Sequence[int], stop_token_ids: Collection[int]) -> Sequence[int]:
    """Return a turn's tokens without the stop token at the end, if it has one."""
    ended = len(turn_ids) > 0 and turn_ids[-1] in stop_token_ids
    return turn_ids[: len(turn_ids) - ended]


class StopScanner:
    """Finds the token with which a turn contains a stop string.

    Args:
        decode: text of tokens.
        stops: the stop strings, at least one.
        token_ids: the turn's tokens so far, or as many of the last ones as `tokens_needed` returns. They contain no
            stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._needed = max(map(len, stops)) - 1 + MARGIN
        """Characters of the text so far in which a stop string may begin, with the margin."""
        self._window = list(token_ids)
        """The last tokens so far."""
        self._longest = self._needed + SLACK
        """Characters of a window from which on it is cut."""
        self._trim(decode(self._window))

    def scan(self, token_ids: Sequence[int]) -> int | None:
        """Take the turn's next tokens; return how many of them belong to it if it contains a stop string now."""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        if not self._contains_stop(text):
            self._window = window
            self._trim(text)
            return None
        end = len(self._window) + 1
        while end < len(window) and not self._contains_stop(self._decode(window[:end])):
            end += 1
        return end - len(self._window)

    def _contains_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _trim(self, text: str) -> None:
        """Drop tokens that no stop string can begin in; not in each scan, because each attempt decodes the rest."""
        if len(text) <= self._longest:
            return
        # As many as are needed if all have equally many characters, and a few more.
        count = len(self._window) * self._needed // len(text) + 4
        while count < len(self._window):
            rest = self._window[-count:]
            if len(kept := self._decode(rest)) >= self._needed:
                self._window, text = rest, kept
                break
            count *= 2
        self._longest = len(text) + SLACK


def tokens_needed(stops: Sequence[str]) -> int:
    """Return the last tokens of a turn that a scanner has to know: a character has at most four tokens."""
    return 4 * (max(map(len, stops)) + MARGIN)
