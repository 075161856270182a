"""verl's replay buffer for the trainer mode `april`."""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from april.integrations.verl.manager import AprilRolloutManager


class AprilReplayBuffer(ReplayBufferAsync):
    """verl's replay buffer. It samples exactly one batch: the groups that april has just handed over."""

    def __init__(self, max_off_policy_threshold: int | None, **settings: Any) -> None:
        super().__init__(max_off_policy_threshold=None, **settings)
        self.manager: AprilRolloutManager | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        metrics = {}
        if partition_id == "train":
            assert self.manager is not None, "fit has not set the agent-loop manager"
            metrics = self.manager.collect(global_steps)
        batch, evicted = super().sample(global_steps, partition_id, batch_size)
        return batch, {**evicted, **metrics}
