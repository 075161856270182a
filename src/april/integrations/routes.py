"""Routes of samples in the form that the trainers of frameworks take: rows for all layers of the model.

Invariants:
- a row is the sample's own: of the version that drew the next token, across interruptions and weight updates;
- where a server has died with that row, the row is of the version that resumed the sample: frameworks know no missing
  rows, and this version's routers are the nearest to the routers of the trained weights (`fill_routes`);
- layers without a router have experts 0, which no trainer reads;
- behind the last row that a server has supplied, rows hold experts 0, 1, 2, …, as the padding of frameworks does. No
  loss depends on them, but for a response that a stop string has ended at the moment when its server died.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from april.engines.servers.server_routes import ServerRoutes
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.routes import Routes
from april.training.router_replay import missing_routes


def shape_of(model: str, setting: str) -> ServerRoutes:
    """Return the shape of the routes of the model that a framework trains.

    Args:
        model: its directory or hub name.
        setting: the framework's setting that turns routes on, with its value, for the error message.

    Raises:
        ValueError: the model has no routers that april knows.
    """
    try:
        return ServerRoutes.of(model, latest=False)
    except ValueError as error:
        raise ValueError(f"{setting}: {model}: {error}; leave the setting out") from None


def whole_routes(
    routes: Routes | None, tokens: int, shape: ServerRoutes, dtype: DTypeLike = np.int32
) -> NDArray[np.integer[Any]]:
    """Return the routes of a sequence, [tokens - 1, layers, top k]: row i is of the pass that predicted token i + 1.

    Args:
        tokens: length of prompt and response.
        dtype: integer type of the result.
    """
    whole = np.zeros((tokens - 1, shape.all_layers, shape.top_k), dtype)
    own = list(shape.layers)
    whole[:, own] = np.arange(shape.top_k)
    if routes is not None:
        known = routes.known[: tokens - 1]
        whole[np.flatnonzero(known)[:, None], own] = routes.experts[: tokens - 1][known]
    return whole


def route_metrics(groups: Sequence[Group], shape: ServerRoutes | None) -> dict[str, float]:
    """Return the share of tokens without routes as a metric; nothing without router replay."""
    return {} if shape is None else missing_routes([sample for group in groups for sample in group.samples])
