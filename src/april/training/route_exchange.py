"""Routes of micro-batches, which the leader holds and sends to the ranks that compute with them.

Invariants:
- a rank holds the routes of one micro-batch at a time, the leader in addition the routes of the step and copies for one
  micro-batch of each rank;
- all ranks call `exchanged` for the same micro-batches in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from april.algorithms.batch import Batch
from april.engines.routers import RouterReplay
from april.rollout.trajectory.routes import Experts
from april.training.ranks import Ranks


def exchanged(
    ranks: Ranks, replay: RouterReplay, batch: Batch, parts: Sequence[Sequence[int]]
) -> tuple[Experts | None, ...] | None:
    """Return the routes of this rank's micro-batch; None if that has no rows. Collective.

    Args:
        batch: all rows; the leader sends its routes, and routes in the batches of other ranks are not read.
        parts: rows of each team's micro-batch.
    """
    own = parts[ranks.team[0]]
    if ranks.leads:
        _send(ranks, replay, batch, parts)
        assert batch.routes is not None
        return tuple(batch.routes[row] for row in own) if own else None
    if not own:
        return None
    ends = list(itertools.accumulate(batch.lengths[row] for row in own))
    routes = replay.unknown_routes(ends[-1])
    dist.recv(_as_bytes(routes), 0)
    rows: list[Any] = np.split(routes, ends[:-1])
    return tuple(rows)


def _send(ranks: Ranks, replay: RouterReplay, batch: Batch, parts: Sequence[Sequence[int]]) -> None:
    assert batch.routes is not None
    sending = []
    for team, part in enumerate(parts):
        first = team * ranks.team_size
        others = [rank for rank in range(first, first + ranks.team_size) if rank > 0]
        if not part or not others:
            continue
        routes = replay.joined([batch.routes[row] for row in part], [batch.lengths[row] for row in part])
        sending += [dist.isend(_as_bytes(routes), rank) for rank in others]
    for sent in sending:
        assert sent is not None, "all ranks are in the group"
        sent.wait()


def _as_bytes(routes: Experts) -> torch.Tensor:
    return torch.from_numpy(routes.reshape(-1).view(np.uint8))
