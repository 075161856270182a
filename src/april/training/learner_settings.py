"""Settings of a learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.lora_settings import LoraSettings
from april.config.settings.rollout_settings import RolloutSettings
from april.config.settings.training_settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of a learner.

    Args:
        algorithm: the objective.
        training: optimisation and micro-batches.
        rollout: distribution of sampled tokens, and the response budget.
        lora: adapters.
        engine: the engine that gets the weights.
        dtype: type of passes.
        cpu_offload: keep parameters and optimizer state in host memory (FSDP2).
        cluster_dtype: type in which engines on a Ray cluster get the weights; None without a cluster.
    """

    algorithm: AlgorithmSettings
    training: TrainingSettings
    rollout: RolloutSettings
    lora: LoraSettings
    engine: EngineSettings
    dtype: torch.dtype
    cpu_offload: bool = False
    cluster_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        dtype: torch.dtype = getattr(torch, recipe.compute_dtype)
        return cls(
            algorithm=recipe.algorithm,
            training=recipe.training,
            rollout=recipe.rollout,
            lora=recipe.lora,
            engine=recipe.engine,
            dtype=dtype,
            cpu_offload=recipe.trainer.cpu_offload,
            cluster_dtype=dtype if recipe.cluster.enabled else None,
        )
