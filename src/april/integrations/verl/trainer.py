"""verl's trainer mode `april`.

Invariants:
- when a replica dies, the other replicas complete the current step, the step is saved, and the run ends with an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from april.integrations.rules.verl_rules import MANAGER, SAMPLER
from april.integrations.verl.manager import AprilRolloutManager
from april.integrations.verl.settings import check_settings
from april.rollout.engine import EngineError
from april.rollout.state_files import read_state, write_state

log = logging.getLogger(__name__)

STATE = "april.json"
"""File of the rollout buffer in a checkpoint of verl."""


@register_trainer("april")
class AprilTrainer(PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=april`: trainer and rollouts take turns on the same GPUs, as in `colocate_async`.

    Settings, each as `+trainer.v1.april.<name>=`: `over_sampling_batch_size` (N', the number of groups in flight, or
    `auto`; default twice `data.train_batch_size`) and `max_staleness` (default 5: the maximum number of weight updates
    between a group's first token and the step that trains on it). `max_off_policy_threshold` and
    `max_off_policy_strategy` have no effect: april keeps the bound without dropping samples.
    """

    def __init__(self, config: DictConfig) -> None:
        check_settings(config)
        with open_dict(config):
            config.trainer.v1.sampler.custom_sampler = SAMPLER
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
        super().__init__(config)
        self.dead: list[str] = []
        """Addresses of replicas that have died."""
        self._resolve_filter_groups_metric()  # verl leaves this check to samplers that are not its own

    def fit(self, agent_loop_manager: AprilRolloutManager) -> None:
        self.replay_buffer.manager = agent_loop_manager
        agent_loop_manager.attach(self._add_prompts_to_generate, self._abort_replicas, self._lost)
        super().fit(agent_loop_manager)

    def get_llm_client(self) -> Any:
        """Return the client that returns the tokens of an aborted request, instead of resuming it by itself."""
        return self.llm_server_manager.get_client()

    def on_train_begin(self) -> None:
        """Do nothing: prompts are started when the sampler needs them."""

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        try:
            return super().step(metrics, timing_raw)
        except EngineError as error:
            if self.checkpoint_manager.replicas:
                raise
            raise RuntimeError(
                f"{self._deaths} None is left: start the run again, and it resumes from its last checkpoint."
            ) from error

    def on_sample_end(self) -> None:
        while True:
            left = len(self.checkpoint_manager.replicas)
            try:
                # The call reports one dead actor at a time: repeat it with the replicas left until all of them answer.
                super().on_sample_end()
                return
            except ActorDiedError as error:
                if self._lost(error) == left:
                    raise

    def on_step_end(self) -> None:
        """Send the weights to the replicas. verl's workers send them to all replicas or to none.

        Raises:
            RuntimeError: a replica has died, so the run cannot continue.
        """
        if not self.dead:
            try:
                super().on_step_end()
            except ActorDiedError as error:
                self._lost(error)
                if not self.dead:
                    raise
        if self.dead:
            raise RuntimeError(f"{self._deaths} Step {self.global_steps} was completed. {self._resume_hint()}")

    def _resume_hint(self) -> str:
        every, folder = self.config.trainer.save_freq, Path(self.config.trainer.default_local_dir)
        if every <= 0:
            return "Nothing is saved, because trainer.save_freq is off."
        saved = folder / f"global_step_{self.global_steps}"
        if not (saved / STATE).is_file():
            self._save_checkpoint()
        return f"It is saved as {saved}: start the run again, and it resumes from there."

    @property
    def _deaths(self) -> str:
        return f"Replica {', '.join(self.dead)} has died, and verl does not restart replicas."

    def _lost(self, error: ActorDiedError) -> int:
        """Remove the replica that has died, and return the number of replicas left."""
        for replica in self.checkpoint_manager.replicas:
            if any(server._actor_id.hex() == error.actor_id for server in replica.servers):
                self.dead.append(replica.server_address)
                self.checkpoint_manager.remove_replicas([replica])
                self.llm_server_manager.global_load_balancer.remove_servers.remote([replica.server_address])
                log.warning("replica %s has died; this step is completed without it", replica.server_address)
        return len(self.checkpoint_manager.replicas)

    async def _abort_replicas(self) -> None:
        # Replicas reject requests that arrive after the abort; SGLang's can only make them wait.
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
        # Before verl's part, so that no checkpoint that verl considers complete lacks the buffer.
        write_state(folder / STATE, self.agent_loop_manager.state_dict())
        super()._save_checkpoint()

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        """Resume the saved groups from their last tokens, instead of starting them again as verl does."""
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        else:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps - 1}"
        if self.config.trainer.resume_mode == "disable" or not (folder / STATE).is_file():
            return int(super()._reissue_inflight_prompts(partition_id))
        waiting: int = self.agent_loop_manager.load_state_dict(read_state(folder / STATE))
        return waiting
