"""verl's trainer mode `april`.

Invariants:
- a replica that dies ends the run once the step under way is completed by the others and saved;
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from april.disk import as_json, write_whole
from april.integrations.verl.manager import AprilRolloutManager
from april.integrations.verl.settings import MANAGER, SAMPLER, check_config
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

STATE = "april.json"
"""The file of a checkpoint of verl's that holds the buffer."""


@register_trainer("april")
class AprilTrainer(PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=april`: trainer and rollouts take turns on the same GPUs, as in `colocate_async`.

    Settings, each as `+trainer.v1.april.<name>=`: `over_sampling_batch_size` (N', groups under way, or `auto`; twice
    `data.train_batch_size`) and `max_staleness` (5; the most weight updates between a group's first token and the step
    that trains on it). `max_off_policy_threshold` and `max_off_policy_strategy` have no effect: the bound is kept
    without dropping.
    """

    def __init__(self, config: DictConfig) -> None:
        check_config(config)
        with open_dict(config):
            config.trainer.v1.sampler.custom_sampler = SAMPLER
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
        super().__init__(config)
        self.dead: list[str] = []
        """The addresses of replicas that have died."""
        self._resolve_filter_groups_metric()  # verl's check of it, which it leaves to other samplers than its own

    def fit(self, agent_loop_manager: AprilRolloutManager) -> None:
        self.replay_buffer.manager = agent_loop_manager
        agent_loop_manager.attach(self._add_prompts_to_generate, self._abort_replicas, self._lost)
        super().fit(agent_loop_manager)

    def get_llm_client(self) -> Any:
        """The client that returns what an aborted request had sampled, instead of asking again by itself."""
        return self.llm_server_manager.get_client()

    def on_train_begin(self) -> None:
        """Prompts are begun as the sampler needs them; there is nothing to warm up."""

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        try:
            return super().step(metrics, timing_raw)
        except EngineError as error:
            if self.checkpoint_manager.replicas:
                raise
            raise RuntimeError(
                f"{self._deaths} None is left: start the run again, and it goes on from its last checkpoint."
            ) from error

    def on_sample_end(self) -> None:
        while True:
            left = len(self.checkpoint_manager.replicas)
            try:
                super().on_sample_end()
                return
            except ActorDiedError as error:
                if self._lost(error) == left:
                    raise

    def on_step_end(self) -> None:
        """Hand out the weights, which verl's workers do to every replica or not at all.

        Raises:
            RuntimeError: a replica has died, so that the run cannot go on.
        """
        if not self.dead:
            try:
                super().on_step_end()
            except ActorDiedError as error:
                self._lost(error)
                if not self.dead:
                    raise
        if self.dead:
            raise RuntimeError(f"{self._deaths} Step {self.global_steps} was completed. {self._way_on()}")

    def _way_on(self) -> str:
        every, folder = self.config.trainer.save_freq, Path(self.config.trainer.default_local_dir)
        if every <= 0:
            return "Nothing is saved, as trainer.save_freq is off."
        saved = folder / f"global_step_{self.global_steps}"
        if not (saved / STATE).is_file():
            self._save_checkpoint()
        return f"It is saved as {saved}: start the run again, and it goes on from there."

    @property
    def _deaths(self) -> str:
        return f"Replica {', '.join(self.dead)} has died, and verl starts none anew."

    def _lost(self, error: ActorDiedError) -> int:
        """Ask nothing more of the replica that has died; how many are left."""
        for replica in self.checkpoint_manager.replicas:
            if any(server._actor_id.hex() == error.actor_id for server in replica.servers):
                self.dead.append(replica.server_address)
                self.checkpoint_manager.remove_replicas([replica])
                self.llm_server_manager.global_load_balancer.remove_servers.remote([replica.server_address])
                log.warning("replica %s has died; this step is completed without it", replica.server_address)
        return len(self.checkpoint_manager.replicas)

    async def _abort_replicas(self) -> None:
        # What reaches a replica after the abort comes back at once, except from SGLang's, which can only let it wait.
        rejects = self.config.actor_rollout_ref.rollout.name != "sglang"
        while True:
            left = len(self.checkpoint_manager.replicas)
            try:
                await self.checkpoint_manager.abort_replicas(reject_request=rejects)
                return
            except ActorDiedError as error:
                if self._lost(error) == left:
                    raise

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / STATE, as_json(self.agent_loop_manager.state_dict()))
        super()._save_checkpoint()

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Go on with the saved groups where they stood, instead of from scratch as verl does."""
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        else:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps - 1}"
        if self.config.trainer.resume_mode == "disable" or not (folder / STATE).is_file():
            return int(super()._reissue_inflight_prompts(partition_id))
        waiting: int = self.agent_loop_manager.load_state_dict(json.loads((folder / STATE).read_text()))
        return waiting
