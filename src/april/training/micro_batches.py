"""Division of a batch's rows into micro-batches, used by every pass over the batch.

Invariants:
- micro-batches partition the rows, and each has at most the token budget, padding included, unless it is a single row;
- a plan depends only on lengths, rows and budget, so all ranks compute the same plan;
- all ranks have the same number of micro-batches, some of which may be empty, and process similar ones at the same
  time.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, packed: bool = False) -> list[list[int]]:
    """Divide `rows` into micro-batches: longest first, similar lengths together to limit padding.

    Args:
        lengths: number of tokens of every row of the batch.
        rows: indices of the rows to divide.
        max_tokens: maximum number of tokens of a micro-batch, padding included.
        packed: rows are packed without padding.
    """
    parts: list[list[int]] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        # Rows are sorted, so the first row of a part is its longest, and padding extends all others to it.
        own = lengths[row] if packed or not parts else lengths[parts[-1][0]]
        if not parts or tokens + own > max_tokens:
            parts.append([])
            tokens, own = 0, lengths[row]
        parts[-1].append(row)
        tokens += own
    return parts


def shares(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int, packed: bool, world: int
) -> list[list[list[int]]]:
    """Return each rank's micro-batches of `rows`: every rank has the same number, the last one may be empty.

    The budget is lowered as far as possible without adding a micro-batch per rank, which balances the ranks.

    Args:
        world: number of ranks.
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
    # Neighbours have similar sizes, so that in each round all ranks compute for about the same time.
    parts.sort(key=lambda part: (-sum(lengths[row] for row in part), part))
    parts += [[]] * (rounds * world - len(parts))
    return [parts[rank::world] for rank in range(world)]
