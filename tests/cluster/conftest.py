"""A real cluster: `make test-cluster` sets up the environment with Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def raylets() -> Iterator[Any]:
    """A head alone: a test adds the nodes that it needs."""
    from tests.cluster.raylets import Raylets

    cluster = Raylets()
    yield cluster
    cluster.close()
