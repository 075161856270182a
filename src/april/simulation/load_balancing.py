"""The replica that each submitted sample goes to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

AFFINITY = 0.25
"""Load above the average, as a share of its slots, up to which a replica is given back samples whose KV cache it
holds."""


def choose_replicas(home: NDArray[np.int64], load: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
    """Return a replica for each sample: the one that holds its KV cache, or else the one with the least load.

    Args:
        home: replica that holds the KV cache of each sample, or -1; [samples].
        load: samples on each replica, [replicas].
        slots: slots of a replica.
    """
    replicas, chosen = len(load), home.copy()
    resumed = np.nonzero(home >= 0)[0]
    if len(resumed):
        most = (load.sum() + len(home)) / replicas + AFFINITY * slots
        order = resumed[np.argsort(home[resumed], kind="stable")]
        per_home = np.bincount(home[resumed], minlength=replicas)
        # Position among the resumed samples of the same replica: the first ones stay, up to `most`.
        rank = np.arange(len(order)) - np.repeat(np.cumsum(per_home) - per_home, per_home)
        chosen[order[rank + load[home[order]] >= most]] = -1
        load = load + np.bincount(chosen[chosen >= 0], minlength=replicas)
    new = np.nonzero(chosen < 0)[0]
    if len(new):
        # Places in order of load: the n-th place of a replica is taken after all places below n of other replicas.
        top = int(np.sort(load)[0]) + -(-len(new) // replicas) + int(load.max() - load.min())
        places = np.maximum(top + 1 - load, 0)
        owner = np.repeat(np.arange(replicas), places)
        level = np.arange(len(owner)) - np.repeat(np.cumsum(places) - places - load, places)
        chosen[new] = owner[np.lexsort((owner, level))[: len(new)]]
    return chosen
