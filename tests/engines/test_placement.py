"""Which nodes of a cluster get how many engines."""

from __future__ import annotations

import pytest

from april.engines.cluster.placement import Demand, Node, Placement, place

HOME, SMALL, LARGE = Node("home", "10.0.0.1", 8, 2), Node("small", "10.0.0.2", 8, 1), Node("large", "10.0.0.3", 8, 5)
NODES = [HOME, SMALL, LARGE]


@pytest.mark.parametrize(
    ("demand", "count", "placement", "expected"),
    [
        (Demand(1, 1), 4, "spread", ["large", "home", "small", "large"]),
        (Demand(1, 1), None, "spread", {"home": 2, "small": 1, "large": 5}),
        (Demand(1, 1), None, "apart", {"small": 1, "large": 5}),
        (Demand(1, 1), 3, "beside", {"home": 2}),
        (Demand(1, 2), None, "spread", {"home": 1, "large": 2}),
        (Demand(4, 0), None, "spread", {"home": 2, "small": 2, "large": 2}),
        (Demand(4, 1), None, "spread", {"home": 2, "small": 1, "large": 2}),
        (Demand(1, 8), None, "spread", {}),
    ],
)
def test_engines_go_where_there_is_room_for_all_of_each(
    demand: Demand, count: int | None, placement: Placement, expected: list[str] | dict[str, int]
) -> None:
    placed = place(NODES, demand, count, placement, "home")
    assert placed == place(NODES[::-1], demand, count, placement, "home")
    if isinstance(expected, list):
        assert placed == expected
    else:
        assert {id: placed.count(id) for id in placed} == expected


def test_a_node_that_is_avoided_gets_none() -> None:
    assert set(place(NODES, Demand(1, 1), None, "spread", "home", avoid={"large"})) == {"home", "small"}
