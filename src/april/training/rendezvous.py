"""Rendezvous of ranks that torchrun started. torchrun's store survives restarts of the ranks.

Invariant: the ranks of one start meet one another and no rank of an earlier start, whatever keys are left in the store.
torchrun counts restarts on each machine separately, so no restart number can distinguish the starts.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch._C import _distributed_c10d as c10d

from april.training.rank_protocol import RankLostError

PAUSE_SECONDS = 0.05


def rendezvous(store: c10d.Store, rank: int, world: int, seconds: float) -> c10d.Store:
    """Return a part of the store that only the ranks of this start use.

    Each rank writes a random token. The leader answers every token that it finds with its own token, until all ranks
    have confirmed the leader's token; a rank of an earlier start is gone and cannot confirm it.

    Raises:
        RankLostError: a rank did not join in time.
        DistError: the leader did not join in time.
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
            raise RankLostError(f"rank {min(missing)} did not join within {seconds:.0f} s")
        for other in missing:
            if store.check([f"april: rank {other}"]):
                store.set(f"april: answer to {store.get(f'april: rank {other}').decode()}", own)
        time.sleep(PAUSE_SECONDS)
    return c10d.PrefixStore(own, store)
