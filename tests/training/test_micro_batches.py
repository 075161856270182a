from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from april.training.micro_batches import plan


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40), st.integers(1, 500), st.booleans())
def test_micro_batches_partition_the_rows_within_the_budget(
    samples: list[tuple[int, bool]], max_tokens: int, packed: bool
) -> None:
    lengths = [length for length, _ in samples]
    rows = [row for row, (_, chosen) in enumerate(samples) if chosen]

    def size(part: list[int]) -> int:
        own = [lengths[row] for row in part]
        return sum(own) if packed else len(own) * max(own)

    parts = plan(lengths, rows, max_tokens, packed)
    assert sorted(itertools.chain(*parts)) == rows
    assert all(len(part) == 1 or size(part) <= max_tokens for part in parts)
    for part, following in itertools.pairwise(parts):
        assert size([*part, following[0]]) > max_tokens, "as full as it can be"
