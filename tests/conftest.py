"""Order and surroundings of all tests."""

from __future__ import annotations

import signal

import pytest

LONG = (
    "test_crash_points.py",
    "ranks/test_run.py",
    "ranks/test_weights.py",
    "training/test_trainer.py",
    "test_mutations.py",
    "engines/servers/test_server_outages.py",
    "integrations/trl/test_job.py",
)
"""Files that take longest. They start first, so that no worker of pytest-xdist is left with one of them at the end."""

# A shell that starts tests in the background has them ignore SIGINT, and `nohup` SIGHUP; commands inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front, in the order of `LONG`."""
    ranks = {name: rank for rank, name in enumerate(LONG)}

    def rank(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((rank for name, rank in ranks.items() if path.endswith(f"/tests/{name}")), len(LONG))

    items.sort(key=rank)
