"""Statistics of the batch that is being collected: its clock and its counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from april.rollout.batch import Failure, Plan, RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.request_interval import RequestInterval
from april.rollout.trajectory.group import Group


class RejectionError(Exception):
    """Too many groups of one step were rejected."""


class StepStats:
    """The batch that is being collected, with its statistics so far.

    Args:
        plan: the plan of admission.
    """

    def __init__(self, plan: Plan) -> None:
        self.batch = RolloutBatch(version=0, plan=plan)
        self._began = 0.0

    def start_step(self, plan: Plan, earlier: Sequence[RequestInterval]) -> None:
        """Start the next batch.

        Args:
            earlier: intervals of attempts at this batch that were cut short.
        """
        self.batch = RolloutBatch(version=0, plan=plan, request_intervals=list(earlier))
        self._began = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        """Seconds since the step began."""
        return asyncio.get_running_loop().time() - self._began

    def add_failure(self, failure: Failure) -> None:
        self.batch.failures.append(failure)

    def add_rejection(self, group: Group, reason: Rejection, limit: int | None, ready: int, needed: int) -> None:
        """Count a rejected group.

        Raises:
            RejectionError: there were more than `limit`.
        """
        rejections = self.batch.rejections
        rejections.append((group.id, reason))
        if limit is not None and len(rejections) > limit:
            counts = ", ".join(f"{reason}: {n}" for reason, n in Counter(reason for _, reason in rejections).items())
            raise RejectionError(
                f"{len(rejections)} groups of this step were rejected ({counts}) and only "
                f"{ready} of {needed} can be trained on: make the task easier or harder, switch the filter off, "
                "or raise max_rejected_groups"
            )

    def close(self, version: int, chosen: list[Group], rest: Sequence[Group]) -> RolloutBatch:
        """Return the batch of `chosen`, which the policy of `version` is trained on; `rest` stays in the buffer."""
        batch = self.batch
        batch.version, batch.groups, batch.seconds = version, chosen, self.now
        # `occupancy` and `idle_slots` are integrals over time until here.
        batch.occupancy /= max(batch.seconds, 1e-9)
        batch.idle_slots /= max(batch.seconds, 1e-9)
        batch.surplus_groups = sum(group.complete for group in rest)
        batch.buffered_groups = len(rest)
        return batch
