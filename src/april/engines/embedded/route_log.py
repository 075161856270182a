"""Routes of one sequence inside the engine, until they are handed out.

Invariants:
- rows are of consecutive tokens; a row that is written again replaces the earlier one and drops those behind it;
- pieces are never changed, so that sequences with the same prompt share them.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from april.rollout.trajectory.routes import Experts, RouteRows


class RouteLog:
    """Rows of consecutive tokens, in pieces.

    Attributes:
        start, end: places of the first token and behind the last one.
    """

    __slots__ = ("_pieces", "end", "start")

    def __init__(self, start: int = 0) -> None:
        self.start = self.end = start
        self._pieces: list[Experts] = []

    def __len__(self) -> int:
        return self.end - self.start

    def copy(self) -> Self:
        """Return a log with the same pieces."""
        other = type(self)(self.start)
        other.end, other._pieces = self.end, [*self._pieces]
        return other

    def cut(self, end: int) -> None:
        """Drop the rows from token `end` on."""
        while self._pieces and self.end - len(self._pieces[-1]) >= end:
            self.end -= len(self._pieces.pop())
        if self.end > end and self._pieces:
            self._pieces[-1] = self._pieces[-1][: end - self.end]
            self.end = end
        if not self._pieces:
            self.start = self.end = min(self.start, end)

    def write(self, start: int, rows: Experts) -> None:
        """Write rows from token `start` on; earlier rows are dropped if there is a gap between them and these."""
        if start < self.end:
            self.cut(start)
        if start != self.end:
            self.start, self._pieces = start, []
        self.end = start + len(rows)
        self._pieces.append(rows)

    def rows(self) -> RouteRows:
        pieces: list[Any] = self._pieces
        return RouteRows(self.start, pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    def take(self) -> RouteRows | None:
        """Return all rows, and forget them; None if there are none."""
        if self.start == self.end:
            return None
        rows, self.start, self._pieces = self.rows(), self.end, []
        return rows


class SequenceRoutes:
    """Routes of a sequence: of its prompt, for sequences that copy the prompt, and those that were not handed out.

    Args:
        prompt: tokens of the prompt.
        handed_out: tokens whose routes the sample has.
        latest: hand out routes again when tokens are computed again.
    """

    __slots__ = ("_handed_out", "_latest", "_pending", "_prompt", "_prompt_length")

    def __init__(self, prompt: int, handed_out: int, latest: bool) -> None:
        self._prompt_length = prompt - 1
        self._prompt = RouteLog()
        self._pending = RouteLog(handed_out)
        self._handed_out = handed_out
        self._latest = latest

    def write(self, start: int, rows: Experts) -> None:
        """Take the routes of tokens that a pass has consumed, from token `start` on."""
        if start < self._prompt_length:
            self._prompt.write(start, rows[: self._prompt_length - start])
        known = 0 if self._latest else self._handed_out - start
        if known < len(rows):
            self._pending.write(max(start, start + known), rows[max(known, 0) :])
            self._handed_out = self._pending.end

    def copy_prompt(self, other: SequenceRoutes) -> None:
        """Take the prompt's routes, with its keys and values, from another sequence."""
        self._prompt = other._prompt.copy()
        if len(self._prompt):
            rows = self._prompt.rows()
            self.write(rows.start, rows.experts)

    def resume(self, paused: SequenceRoutes, kept: int) -> int:
        """Take over the routes of the same sample's paused sequence, of which the cache holds the first `kept` tokens.
        Return how many of these need not be computed again.

        The sample may lack rows that the paused sequence has handed out: it takes none of its last token, and drops
        tokens behind a stop string.
        """
        known, pending = self._handed_out, paused._pending.copy()
        kept = min(kept, max(known, pending.end) if pending.start <= known else known)
        self._prompt = paused._prompt.copy()
        self._prompt.cut(kept)
        pending.cut(kept)
        if len(pending):
            rows = pending.rows()
            self.write(rows.start, rows.experts)
        return kept

    def take(self) -> RouteRows | None:
        """Return the routes that were not handed out."""
        return self._pending.take()
