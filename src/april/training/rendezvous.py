"""How ranks that torchrun started meet. Its store lasts from one start of the ranks to the next.

Invariant: ranks of one start meet one another, and none that was lost, whatever was left in the store: torchrun counts
starts on each machine by itself, so no number tells them apart.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch._C import _distributed_c10d as c10d

from april.training.rank_protocol import RankLostError

PAUSE_SECONDS = 0.05


def rendezvous(store: c10d.Store, rank: int, world: int, seconds: float) -> c10d.Store:
    """A part of the store for the ranks of this start alone.

    Each brings a word that is new. The leader answers whatever words it finds with its own, until all ranks have
    repeated that one: whoever was lost cannot.

    Raises:
        RankLostError: a rank did not come in time.
        DistError: the leader did not come in time.
    """
    own = uuid4().hex
    if rank > 0:
        store.set(f"april: rank {rank}", own)
        answer = f"april: answer to {own}"
        store.wait([answer], timedelta(seconds=seconds))
        word = store.get(answer).decode()
        store.set(f"april: {rank} met {word}", "")
        return c10d.PrefixStore(word, store)
    deadline = time.monotonic() + seconds
    missing = set(range(1, world))
    while missing := {other for other in missing if not store.check([f"april: {other} met {own}"])}:
        if time.monotonic() > deadline:
            raise RankLostError(f"rank {min(missing)} did not come in {seconds:.0f} s")
        for other in missing:
            if store.check([f"april: rank {other}"]):
                store.set(f"april: answer to {store.get(f'april: rank {other}').decode()}", own)
        time.sleep(PAUSE_SECONDS)
    return c10d.PrefixStore(own, store)
