"""One of several engines that do the same, any of which may die."""

from __future__ import annotations

from april.rollout.engine import EngineError


class ReplicaGoneError(EngineError):
    """The replica does not come back: nobody starts it again."""
