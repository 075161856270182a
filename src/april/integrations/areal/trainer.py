"""AReaL's trainer, whose training batches come from april."""

from __future__ import annotations

import copy
from typing import Any

import torch
from areal.api.cli_args import PPOConfig
from areal.engine import RemoteSGLangEngine, RemotevLLMEngine
from areal.infra import RolloutController
from areal.trainer import rl_trainer
from areal.utils.environ import is_single_controller
from areal.utils.network import format_hostport

from april.integrations.areal.rollouts import Rollouts, TrainingDataloader
from april.integrations.areal.settings import check_settings
from april.integrations.settings import Settings


class TrainingBatches:
    """Mix-in for AReaL's rollout engine, and for the controller of several: training batches come from april."""

    rollouts: Rollouts
    get_version: Any

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: Any = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """See `Rollouts.batch`. As in AReaL, all calls use the workflow of the first call."""
        client, addresses = self._client()
        resolved = client._resolve_workflow(workflow, workflow_kwargs)
        accept = client._resolve_should_accept_fn(should_accept_fn)
        return self.rollouts.batch(addresses, self.get_version(), resolved, accept)

    def _client(self) -> tuple[Any, list[str]]:
        """Return AReaL's client of inference servers, and the addresses of all servers."""
        raise NotImplementedError

    def pause(self) -> None:
        self.rollouts.pause()
        super().pause()  # type: ignore[misc]

    def resume(self) -> None:
        self.rollouts.resume(self.get_version())
        super().resume()  # type: ignore[misc]

    def destroy(self) -> None:
        self.rollouts.close()
        super().destroy()  # type: ignore[misc]


class TrainingEngine(TrainingBatches):
    """AReaL's rollout engine in the process that trains."""

    _engine: Any

    def __init__(self, config: Any, rollouts: Rollouts) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.rollouts = rollouts

    def _client(self) -> tuple[Any, list[str]]:
        return self._engine, self._engine.addresses


class SGLangEngine(TrainingEngine, RemoteSGLangEngine):  # type: ignore[misc]
    """AReaL's rollout engine over SGLang's servers."""


class VLLMEngine(TrainingEngine, RemotevLLMEngine):  # type: ignore[misc]
    """AReaL's rollout engine over vLLM's servers."""


class Controller(TrainingBatches, RolloutController):  # type: ignore[misc]
    """AReaL's single controller of rollout engines that run in processes of their own."""

    def _client(self) -> tuple[Any, list[str]]:
        addresses = [format_hostport(server.host, server.port) for server in self.server_infos]
        return self.inf_engine(self.config)._engine, addresses


class PPOTrainer(rl_trainer.PPOTrainer):  # type: ignore[misc]
    """AReaL's trainer with april's rollouts. `rollout.max_head_offpolicyness` is the staleness bound.

    Args:
        over_sampling_batch_size: number of groups in flight (N'), or "auto" to choose it from measurements.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """

    def __init__(
        self, config: PPOConfig, *datasets: Any, over_sampling_batch_size: Any = "auto", **others: Any
    ) -> None:
        settings = Settings(
            over_sampling_batch_size=over_sampling_batch_size, max_staleness=config.rollout.max_head_offpolicyness
        )
        check_settings(config, settings)
        self.rollouts = Rollouts(config, settings)
        try:
            super().__init__(config, *datasets, **others)
        except BaseException:
            self.rollouts.close()
            raise

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        dataloader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        if dataset_config is self.config.train_dataset:
            self.rollouts.dataloader = TrainingDataloader(dataloader, self.rollouts)
            return self.rollouts.dataloader
        return dataloader

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        if is_eval:
            return super()._init_rollout(rollout_config, is_eval, lora_path)
        if not is_single_controller():
            kind = VLLMEngine if self.rollout_alloc.backend == "vllm" else SGLangEngine
            engine = kind(copy.deepcopy(rollout_config), self.rollouts)
            engine.initialize(train_data_parallel_size=self.actor_alloc.parallel.dp_size)
            return engine
        controller = super()._init_rollout(rollout_config, is_eval, lora_path)
        # AReaL's method makes the controller, starts servers and connects to them: no part of it can be replaced.
        controller.__class__ = Controller
        controller.rollouts = self.rollouts
        return controller

    def _ensure_proxy_started(self) -> None:
        raise ValueError(
            "workflow: agent workflows, which talk to AReaL's proxy, are not supported; give a RolloutWorkflow that "
            "requests one response"
        )
