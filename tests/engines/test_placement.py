"""Which nodes of a cluster get how many engines and ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.ray.placement import Demand, DevicePlace, Node, Placement, engine_places, pack, place, without

HOME, SMALL, LARGE = Node("home", "10.0.0.1", 8, 2), Node("small", "10.0.0.2", 8, 1), Node("large", "10.0.0.3", 8, 5)
NODES = [HOME, SMALL, LARGE]


@pytest.mark.parametrize(
    ("demand", "count", "placement", "expected"),
    [
        (Demand(1, 1), 4, "spread", ["large", "home", "small", "large"]),
        (Demand(1, 1), None, "spread", {"home": 2, "small": 1, "large": 5}),
        (Demand(1, 1), None, "exclude_trainer", {"small": 1, "large": 5}),
        (Demand(1, 1), 3, "trainer_only", {"home": 2}),
        (Demand(1, 2), None, "spread", {"home": 1, "large": 2}),
        (Demand(4, 0), None, "spread", {"home": 2, "small": 2, "large": 2}),
        (Demand(4, 1), None, "spread", {"home": 2, "small": 1, "large": 2}),
        (Demand(1, 8), None, "spread", {}),
    ],
)
def test_an_engine_is_placed_on_a_node_with_room_for_all_of_it(
    demand: Demand, count: int | None, placement: Placement, expected: list[str] | dict[str, int]
) -> None:
    placed = place(NODES, demand, count, placement, {"home"})
    assert placed == place(NODES[::-1], demand, count, placement, {"home"})
    if isinstance(expected, list):
        assert placed == expected
    else:
        assert {id: placed.count(id) for id in placed} == expected


def test_an_avoided_node_gets_no_engine() -> None:
    assert set(place(NODES, Demand(1, 1), None, "spread", {"home"}, avoid={"large"})) == {"home", "small"}


def test_engines_avoid_or_use_only_the_nodes_that_train() -> None:
    training = {"home", "large"}
    assert set(place(NODES, Demand(1, 1), None, "exclude_trainer", training)) == {"small"}
    assert set(place(NODES, Demand(1, 1), None, "trainer_only", training)) == training


def test_ranks_fill_the_node_of_rank_0_then_the_nodes_with_most_room() -> None:
    order = ["home"] * 2 + ["large"] * 5 + ["small"]
    assert pack(NODES, Demand(1, 1), 9, "home") == pack(NODES[::-1], Demand(1, 1), 8, "home") == order
    assert pack(NODES, Demand(1, 1), 3, "elsewhere") == ["large"] * 3
    assert pack(NODES, Demand(1, 1), 3, "home", avoid={"home", "large"}) == ["small"]


def test_engines_get_no_resources_of_ranks() -> None:
    left = without(NODES, Demand(2, 1), ["home", "home", "large"])
    assert [(node.id, node.cpus, node.gpus) for node in left] == [("home", 4, 0), ("small", 8, 1), ("large", 6, 4)]


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.none() | st.integers(0, 6))
def test_each_engine_beside_ranks_has_the_gpus_of_neighbours_on_one_node(
    nodes: list[int], each: int, count: int | None
) -> None:
    numbers: Counter[int] = Counter()
    ranks = []
    for node in nodes:
        ranks.append(DevicePlace(f"node {node}", (str(numbers[node]),)))
        numbers[node] += 1
    placed = engine_places(ranks, each, count)
    fit = sum(number // each for number in numbers.values())
    assert len(placed) == (fit if count is None else min(count, fit))
    used = [(engine.node, gpu) for engine in placed for gpu in engine.gpus]
    assert len(set(used)) == len(used), "no GPU has two engines"
    assert set(used) <= {(rank.node, *rank.gpus) for rank in ranks}
    for engine in placed:
        first = int(engine.gpus[0])
        assert engine.gpus == tuple(map(str, range(first, first + each)))


def test_engines_beside_ranks_on_cpus_have_no_gpus() -> None:
    ranks = [DevicePlace("home"), DevicePlace("small")]
    assert engine_places(ranks, 1, None) == ranks
