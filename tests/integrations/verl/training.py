"""verl's own training worker on machines without a GPU: its actor, FSDP2 engine, loss and optimizer, over gloo.

The replicas of `trainer.py` get the weights that verl sends.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from april.integrations.verl import AprilTrainer
from april.integrations.verl.manager import row_of
from tests.integrations.verl import on_cpu  # noqa: F401 - the platform of these classes
from tests.integrations.verl.trainer import TinyTrainer

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
SETTINGS = (
    *(f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.use_torch_compile=false"),
    *(f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"),
    *(f"{ACTOR}.fsdp_config.model_dtype=fp32", f"{ACTOR}.fsdp_config.use_torch_compile=false"),
    f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=3", f"{MODEL}.use_remove_padding=false"),
    *(f"{MODEL}.enable_gradient_checkpointing=false", f"+{MODEL}.override_config={{attn_implementation:eager}}"),
    *("algorithm.rollout_correction.rollout_is=token", "reward.custom_reward_function.name=compute_sum"),
)
"""Two ranks in float32, without what needs a GPU: flash attention and compiled kernels."""


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """One rank of verl's actor."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """What verl would send to its replicas, of rank 0; the others help to gather it."""
        named, _ = self.actor.engine.get_per_tensor_param()
        weights = {name: tensor.detach().clone() for name, tensor in named}
        assert all(type(tensor) is torch.Tensor for tensor in weights.values())
        return weights if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shard(self) -> tuple[int, int]:
        """Numbers of parameters: in this rank, and in all."""
        own = [p.to_local().numel() for p in self.actor.engine.module.parameters()]
        return sum(own), sum(p.numel() for p in self.actor.engine.module.parameters())


class Workers:
    """verl's worker group of two ranks; its weights go to the replica of the tests."""

    ranks = 2
    world_size = 1
    """What the number of replicas follows from."""

    def __init__(self, config: Any) -> None:
        self.servers: list[Any] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        """Of each version that replicas had."""
        pool = RayResourcePool([self.ranks], use_gpu=False, max_colocate_count=1)
        actor = RayClassWithInitArgs(cls=ray.remote(Actor), config=config.actor_rollout_ref, role="actor")
        self.group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actor, device_name="cpu")
        self.group.init_model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "naive"
        self.weights[global_steps] = self.group.whole_weights()[0]
        return [server.set_weights.remote(global_steps, self.weights[global_steps]) for server in self.servers]


class TrainingTrainer(TinyTrainer):
    """`AprilTrainer` with verl's own training step. `metrics` keeps the metrics of every step."""

    def workers(self) -> Any:
        return Workers(self.config)

    def _step_once(self, metrics: dict[str, Any], timing: dict[str, Any], sample_batch_size: int) -> Any:
        batch = AprilTrainer._step_once(self, metrics, timing, sample_batch_size)
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        rows = [row_of(data, i) for i in range(len(batch.keys))]
        self.batches.append([{**row, "tag": tag} for row, tag in zip(rows, batch.tags, strict=True)])
        self.steps = [*getattr(self, "steps", []), dict(metrics)]
        return batch
