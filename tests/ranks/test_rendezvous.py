"""Ranks that torchrun restarts meet one another, over a store with keys of lost ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistError, HashStore, Store

from april.training.rank_protocol import RankLostError
from april.training.rendezvous import rendezvous


def start(store: Store, ranks: range, world: int) -> list[Store]:
    """Where each of these ranks is when all have come."""
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, world, 60), ranks))


def alike(places: list[Store]) -> bool:
    """Whether all these places are one."""
    places[0].set("here", "")
    return all(place.check(["here"]) for place in places)


def test_ranks_of_one_start_meet_and_see_no_earlier_start() -> None:
    store = HashStore()
    assert alike(start(store, range(3), 3))
    with pytest.raises(DistError):  # no leader
        rendezvous(store, 1, 3, 0.01)
    with pytest.raises(RankLostError, match="rank 1 did not join within 0 s"):
        rendezvous(store, 0, 3, 0.0)
    again = start(store, range(3), 3)
    assert not again[0].check(["here"])
    assert alike(again)
