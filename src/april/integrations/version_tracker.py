"""When the weights that a framework brings to its engines are a new policy version.

Invariant: a version ends with the step that is trained on: weights that come after a step was taken are the next
version, weights that come before one was (at a start, a restart, for an evaluation) are the version's own.
"""

from __future__ import annotations

from typing import Any

from april.rollout.scheduler import RolloutScheduler


class VersionTracker:
    """Follows a framework that says only that there are weights, not which."""

    def __init__(self, scheduler: RolloutScheduler, taken: bool = False) -> None:
        self.scheduler = scheduler
        self.taken = taken
        """A step was taken under the current version. Part of what is saved."""

    async def catch_up(self, weights: Any = None) -> None:
        """The framework has brought weights since the last call.

        Raises:
            StalenessError: without a step since the last version, a group would become too old to be trained on.
        """
        if self.taken:
            await self.scheduler.update_weights(weights)
        else:
            await self.scheduler.update_weights(weights, version=self.scheduler.engine_version)
        self.taken = False
