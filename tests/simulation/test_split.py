from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.simulation.split import Split, best, try_splits


@given(st.integers(2, 600), st.data())
def test_the_search_finds_nearly_the_best_split(gpus: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(1, gpus - 1))
    generating, training = data.draw(st.floats(1, 100)), data.draw(st.floats(1, 100))
    asked = []

    def measure(training_gpus: int) -> float:
        assert least <= training_gpus < gpus
        asked.append(training_gpus)
        return min(training * training_gpus, generating * (gpus - training_gpus))

    splits = try_splits(gpus, least, measure)
    assert [split.training_gpus for split in splits] == sorted(set(asked)), "each is tried once"
    assert len(asked) == len(set(asked)) <= 24, "five, then two more for each time that the range is halved"
    most = max(min(training * n, generating * (gpus - n)) for n in range(least, gpus))
    assert best(splits).tokens_per_second == pytest.approx(most)


def test_of_equal_splits_fewer_gpus_train() -> None:
    assert best([Split(1, 5.0), Split(2, 9.0), Split(3, 9.0)]).training_gpus == 2
