"""Which rows of a batch go through the model together: the one plan of every pass over it.

Invariants:
- the micro-batches partition the rows they are made from, and each holds at most the token budget, padding included,
  unless it is a single row;
- a plan follows from lengths, rows and budget alone, so whoever knows these has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, packed: bool = False) -> list[list[int]]:
    """`rows` of these `lengths` in micro-batches: like lengths together, so that little is padded, longest first.

    Args:
        lengths: tokens of every row of the batch.
        rows: which of them.
        max_tokens: tokens of a micro-batch at most, padding included.
        packed: nothing is padded.
    """
    parts: list[list[int]] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        own = lengths[row] if packed or not parts else lengths[parts[-1][0]]
        if not parts or tokens + own > max_tokens:
            parts.append([])
            tokens, own = 0, lengths[row]
        parts[-1].append(row)
        tokens += own
    return parts
