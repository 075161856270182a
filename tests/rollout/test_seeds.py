"""Seeds of samples are NumPy's, made of many groups at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.rollout.seeds import seeds

NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 2**160))


@given(NUMBERS, st.integers(0, 2**32 - 1), st.integers(1, 20), st.lists(NUMBERS, max_size=3))
def test_they_are_those_of_a_seed_sequence(seed: int, group: int, n: int, more: list[int]) -> None:
    expected = np.random.SeedSequence((seed, group, *more)).generate_state(n, np.uint64)
    assert seeds(seed, group, n, *more) == expected.tolist()


@pytest.mark.parametrize(("seed", "group"), [(-1, 0), (0, -1), (0, 2**32)])
def test_numbers_that_have_no_seeds_are_named(seed: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"seed {seed}, group {group}: "):
        seeds(seed, group, 8)
