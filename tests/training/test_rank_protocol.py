"""What a rank reads from its environment."""

from __future__ import annotations

import pytest

from april.training.rank_protocol import NODES, places_of_ranks


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ("", []),
        ("a1=0 a1=3 b2=GPU-7f,GPU-8e", [("a1", ("0",)), ("a1", ("3",)), ("b2", ("GPU-7f", "GPU-8e"))]),
        ("a1= b2=", [("a1", ()), ("b2", ())]),
    ],
)
def test_the_nodes_and_gpus_of_other_ranks(
    value: str, places: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODES, value)
    assert places_of_ranks() == places
