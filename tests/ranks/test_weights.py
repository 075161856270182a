"""Weights of a sharded policy reach engines whole, by every way there is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sharded_weights


def test_engines_take_the_policy_by_broadcast_by_directory_and_by_tensors() -> None:
    """The benchmark on a small policy: each engine's checksum equals the policy's."""
    found = sharded_weights.measure(1, 16)
    assert all(found[way]["seconds"]["runs"] == 1 for way in sharded_weights.WAYS)
