"""SkyRL's fully asynchronous trainer with april's rollouts.

Invariants:
- april's scheduler starts groups and generates on SkyRL's servers during training; SkyRL's generation workers do
  nothing;
- no group is trained on more than `max_staleness` weight updates after its first token; SkyRL's own trainer limits
  admission only;
- a step trains on the N oldest complete groups that the bound allows; none is dropped at the end of an epoch;
- generation is interrupted for each weight update, and for the snapshot of each checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup, _AsyncDataloader

from april.integrations.skyrl.checkpoint import load_state, save_state
from april.integrations.skyrl.generator import Generator, TrainingDataloader


class TrainedGroups(_AsyncDataloader):  # type: ignore[misc]
    """SkyRL's record of the groups that were trained on in this epoch. april draws the rows itself, across epochs."""

    def load_state_from_checkpoint(self, consumed: set[str], filtered: set[str] | None = None) -> None:
        self._consumed_data_uids, self._filtered_data_uids = consumed, filtered or set()

    async def reset_at_epoch_end(self) -> None:
        self._consumed_data_uids.clear()
        self._filtered_data_uids.clear()


class SavedRows:
    """The dataloader's state at the moment of a snapshot, for SkyRL's part of the checkpoint."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state


class FullyAsyncTrainer(FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """SkyRL's fully asynchronous trainer. Its checkpoints include the rollout buffer."""

    generator: Generator
    train_dataloader: Any

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.async_train_dataloader = TrainedGroups(self.train_dataloader, self.mini_batch_size)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        super()._build_train_dataloader_and_compute_training_steps()
        self.train_dataloader = TrainingDataloader(self.train_dataloader, 1)
        self.generator.dataloader = self.train_dataloader

    async def train(self) -> None:
        self._loop = asyncio.get_running_loop()
        save_weights = self.dispatch.save_weights_for_sampler

        async def update() -> None:
            await self.generator.update_weights(save_weights)

        self.dispatch.save_weights_for_sampler = update
        try:
            await super().train()
        finally:
            self.dispatch.save_weights_for_sampler = save_weights
            await self.generator.close()

    async def _run_generate_for_a_group_loop(self, generation_output_group_buffer: Any) -> None:
        """End at once: april's scheduler generates."""

    async def _collect_generation_mini_batch(
        self, generation_output_group_buffer: Any, all_generators_done: Any
    ) -> tuple[list[GeneratedOutputGroup], list[GeneratedOutputGroup], bool]:
        """Return the next batch as SkyRL's workers would have put it into their buffer."""
        with self._phase_gauge.timed_phase("wait_for_generation_buffer", self.all_timings):
            groups = await self.generator.next_groups()
        self.all_metrics.update(self.generator.metrics())
        # The record of SkyRL's staleness control, which it checks at the end of an epoch.
        counts = self._staleness_manager._stat
        counts.submitted += len(groups)
        counts.accepted += len(groups)
        batch = self.generator.latest
        assert batch is not None, "a batch was taken"
        made = []
        for (output, prompts), group in zip(groups, batch.groups, strict=True):
            begun = self.global_step - group.staleness(batch.version)
            made.append(GeneratedOutputGroup(output, str(group.id), begun, None, prompts))
        return made, [], False

    def save_checkpoints(self) -> str:
        # SkyRL calls this in a thread, during generation.
        assert self._loop is not None, "training has begun"
        snapshot = asyncio.run_coroutine_threadsafe(self.generator.snapshot(), self._loop)
        state, rows = snapshot.result()
        save_state(state, self.cfg.trainer.ckpt_path, self.global_step)
        dataloader, self.train_dataloader = self.train_dataloader, SavedRows(rows)
        try:
            path: str = super().save_checkpoints()
        finally:
            self.train_dataloader = dataloader
        return path

    def load_checkpoints(self) -> tuple[Any, ...]:
        loaded: tuple[Any, ...] = super().load_checkpoints()
        load_state(self.generator, loaded[1])
        return loaded
