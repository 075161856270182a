"""Routes of the tokens of a forward pass, given to their sequences.

Invariant: a sequence gets the routes of tokens that it has, and of all of them before its prompt is copied or it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from april.engines.embedded.sequence import Sequence
from april.engines.embedded.token_runs import TokenRun
from april.rollout.trajectory.routes import Experts


class DraftRoutes(NamedTuple):
    """Routes of drafted tokens, the first of them at position `start`."""

    sequence: Sequence
    start: int
    routes: Experts

    def write(self) -> None:
        """Give the sequence the routes of the tokens that were accepted; the last accepted one is consumed later."""
        accepted = len(self.sequence.tokens) - 1 - self.start
        if accepted > 0 and self.sequence.routes is not None:
            self.sequence.routes.write(self.start, self.routes[:accepted])


def write_routes(runs: Iterable[TokenRun], routes: Experts) -> list[DraftRoutes]:
    """Give each sequence the routes of its tokens in a pass, and return those of drafts, which are not verified yet.

    Args:
        routes: [tokens, layers, top k], in the order of `runs`.
    """
    drafts, at = [], 0
    for sequence, start, tokens in runs:
        rows, at = routes[at : at + len(tokens)], at + len(tokens)
        if start >= len(sequence.tokens):
            drafts.append(DraftRoutes(sequence, start, rows))
        elif sequence.routes is not None:
            sequence.routes.write(start, rows)
    return drafts
