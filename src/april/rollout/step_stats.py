"""The account of the step that is being collected: its clock, and what is counted as it goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from april.rollout.batch import Plan, RequestInterval, RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.trajectory import Group


class RejectionError(Exception):
    """Too many groups of one step were turned away."""


class StepStats:
    """A step in the making.

    Args:
        plan: what admission aims at.
        earlier: what attempts at this step brought that were cut short.
    """

    def __init__(self, plan: Plan, earlier: Sequence[RequestInterval] = ()) -> None:
        self.batch = RolloutBatch(version=0, plan=plan, request_intervals=list(earlier))
        self._began = 0.0

    def start(self) -> None:
        self._began = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        """Seconds since the step began."""
        return asyncio.get_running_loop().time() - self._began

    def reject(self, group: Group, reason: Rejection, limit: int | None, ready: int, needed: int) -> None:
        """Count a group that was turned away.

        Raises:
            RejectionError: there were more than `limit`.
        """
        rejections = self.batch.rejections
        rejections.append((group.id, reason))
        if limit is not None and len(rejections) > limit:
            counts = ", ".join(f"{reason}: {n}" for reason, n in Counter(reason for _, reason in rejections).items())
            raise RejectionError(
                f"{len(rejections)} groups of this step were turned away ({counts}) and only "
                f"{ready} of {needed} can be trained on: make the task easier or harder, switch the filter off, "
                "or raise max_rejected_groups"
            )

    def close(self, version: int, chosen: list[Group], rest: Sequence[Group]) -> RolloutBatch:
        """The step that is taken at `version`; `rest` stays under way."""
        batch = self.batch
        batch.version, batch.groups, batch.seconds = version, chosen, self.now
        batch.occupancy /= max(batch.seconds, 1e-9)
        batch.surplus_groups = sum(group.complete for group in rest)
        batch.buffered_groups = len(rest)
        batch.buffered_tokens = sum([s.length - s.environment_tokens for group in rest for s in group.samples])
        return batch
