"""Which rows of a batch go through the model together: the one plan of every pass over it.

Invariants:
- the micro-batches partition the rows they are made from, and each holds at most the token budget, padding included,
  unless it is a single row;
- a plan follows from lengths, rows and budget alone, so whoever knows these has the same one;
- several ranks have as many micro-batches each, give or take one, and at any moment like ones.
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


def share(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int, packed: bool, rank: int, world: int
) -> list[list[int]]:
    """One rank's micro-batches of `rows`: as many as every other rank's, the last one empty where there are too few.

    The budget is lowered as far as that makes no rank's share longer, so that all have something to do.

    Args:
        world: the number of ranks; `rank` is below it.
    """
    rounds = -(-len(plan(lengths, rows, max_tokens, packed)) // world)
    low, high = 0, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        if len(plan(lengths, rows, middle, packed)) <= rounds * world:
            high = middle
        else:
            low = middle
    parts = plan(lengths, rows, high, packed)
    parts.sort(key=lambda part: (-sum(lengths[row] for row in part), part))
    own = parts[rank::world]
    return own + [[]] * (rounds - len(own))
