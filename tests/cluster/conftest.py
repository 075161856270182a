"""A real cluster: `make test-cluster` sets up the environment with Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # Ray requires a token if this machine's user has one.


@pytest.fixture(scope="session")
def head() -> Iterator[Any]:
    from tests.cluster.raylets import Raylets

    cluster = Raylets()
    yield cluster
    cluster.close()


@pytest.fixture
def raylets(head: Any) -> Iterator[Any]:
    """A head alone: a test adds the nodes that it needs, and they end with it."""
    yield head
    for node in head.nodes:
        head.remove(node)
    head.settle()
