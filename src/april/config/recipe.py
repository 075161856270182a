"""A recipe: every setting of a run, by section.

Invariant: a setting has one name, in the file and as a flag: `[rollout] max_staleness` is `--max-staleness`,
`[task] name` is `--task.name`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any

import tyro
from pydantic import TypeAdapter

from april.config.machine import visible_gpus
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.config.settings.cluster_settings import ClusterSettings
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.environment_settings import PROGRAM_SECONDS, EnvironmentSettings
from april.config.settings.gateway_settings import GatewaySettings
from april.config.settings.lora_settings import LoraSettings
from april.config.settings.model_settings import ModelSettings
from april.config.settings.reporting_settings import ReportingSettings
from april.config.settings.rollout_settings import RolloutSettings
from april.config.settings.trainer_settings import TrainerSettings
from april.config.settings.training_settings import TrainingSettings
from april.rollout.params import EpisodeLimits, FaultSettings, RolloutParams
from april.rollout.sampling import COLDEST, SamplingParams
from april.secrets import redacted
from april.tasks.task import TaskSpec

GPU_SLOTS, CPU_SLOTS = 256, 64
"""Defaults of `max_num_seqs`."""
FLAT: Any = tyro.conf.OmitArgPrefixes
"""Marks a section whose flags have no prefix."""


@dataclass(kw_only=True)
class Recipe:
    """Every setting of a run, by section."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """The policy."""
    task: TaskSpec = field(default_factory=lambda: TaskSpec("reasoning_gym", name="gcd"))
    """Problems and rewards."""
    rollout: Annotated[RolloutSettings, FLAT] = field(default_factory=RolloutSettings)
    """Rollouts: batch sizes, staleness, sampling, rewards."""
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """Environment of multi-turn episodes."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    """Gateway for programs."""
    engine: Annotated[EngineSettings, FLAT] = field(default_factory=EngineSettings)
    """Inference engine."""
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    """Ray cluster."""
    algorithm: Annotated[AlgorithmSettings, FLAT] = field(default_factory=AlgorithmSettings)
    """Training objective."""
    training: Annotated[TrainingSettings, FLAT] = field(default_factory=TrainingSettings)
    """Optimisation, evaluation and checkpoints."""
    trainer: Annotated[TrainerSettings, FLAT] = field(default_factory=TrainerSettings)
    """Training processes and their parallelism."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters."""
    reporting: Annotated[ReportingSettings, FLAT] = field(default_factory=ReportingSettings)
    """Output directory, console and trackers."""

    @property
    def compute_dtype(self) -> str:
        """Type of the trainer's passes and of generation, with `auto` resolved."""
        own = self.model
        if own.compute_dtype != "auto":
            return own.compute_dtype
        return "bfloat16" if own.dtype == "bfloat16" or own.on_gpu else "float32"

    def rollout_params(self, partial_rollout: bool | None = None) -> RolloutParams:
        """Return the scheduler's parameters.

        The policy `april-paper` has no staleness bound, trains on the groups that complete first, and defaults to
        N' = 2 N.

        Args:
            partial_rollout: overrides the recipe's setting.

        Raises:
            ValueError: settings that contradict each other.
        """
        rollout, paper = self.rollout, self.rollout.policy == "april-paper"
        target = rollout.over_sampling_batch_size
        return RolloutParams(
            rollout_batch_size=rollout.rollout_batch_size,
            n_samples_per_prompt=rollout.n_samples_per_prompt,
            over_sampling_batch_size=2 * rollout.rollout_batch_size if paper and target == "auto" else target,
            max_staleness=None if paper else rollout.max_staleness,
            partial_rollout=rollout.partial_rollout if partial_rollout is None else partial_rollout,
            first_come=paper,
            ramp_steps=rollout.ramp_steps,
            admission_window=rollout.admission_window,
            redraft=self.engine.on_update == "redraft",
            latest_routes=self.training.router_replay == "latest",
        )

    @property
    def overlaps(self) -> bool:
        """Whether generation overlaps with training: requested or `auto`, and possible."""
        rollout, engine = self.rollout, self.engine
        apart = engine.own_process or self.cluster.enabled or engine.engine in ("vllm", "sglang")
        stale = rollout.partial_rollout and (rollout.policy == "april-paper" or rollout.max_staleness > 0)
        return bool(self.trainer.overlap) and apart and stale and not self.shares_devices

    @property
    def shares_devices(self) -> bool:
        """Whether engine and trainer use the same devices in turn."""
        return self.trainer.layout == "shared"

    @property
    def keeps_cache_in_training(self) -> bool:
        """Whether KV caches are kept during a training step, or generation overlaps with it."""
        return self.overlaps or self.engine.on_update == "keep"

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine; 0 for an engine on the CPU."""
        own = self.engine.gpus_per_replica
        return (self.engine.gpus_by_arguments or 1) if own == "auto" else own

    @property
    def slots(self) -> int:
        """Maximum number of samples that an engine decodes together, with `auto` resolved."""
        if self.engine.max_num_seqs != "auto":
            return self.engine.max_num_seqs
        trainer_only = self.generates_inside or self.engine.own_process
        on_gpu = self.model.on_gpu if trainer_only else self.gpus_per_engine > 0 and bool(visible_gpus())
        return GPU_SLOTS if on_gpu else CPU_SLOTS

    @property
    def generates_inside(self) -> bool:
        """Whether the engine runs in the training process."""
        inside = self.engine.engine in ("embedded", "vllm-inproc")
        return inside and not self.engine.own_process and not self.cluster.enabled

    @property
    def engines_inside(self) -> int:
        """Number of training processes with an engine: all of them, or the first."""
        if not self.generates_inside:
            return 0
        return self.trainer.processes if self.engine.engine == "embedded" else 1

    @property
    def engines_here(self) -> list[str]:
        """Names of the engines that april starts on this machine in processes of their own."""
        if self.cluster.enabled or self.engine.urls or self.generates_inside:
            return []
        if self.engine.own_process:
            return ["embedded"]
        return [f"{self.engine.engine}-{index}" for index in range(self.engine.replicas)]

    @property
    def engines_beside(self) -> int:
        """Minimum number of engines on GPUs of their own; 0 for an engine in the training process."""
        if self.cluster.enabled:
            return 1 if self.cluster.replicas == "auto" else self.cluster.replicas
        servers = len(self.engine.urls) or self.engine.replicas
        return servers if self.engine.engine in ("vllm", "sglang") else 0

    @property
    def ranks_on_nodes(self) -> int:
        """Number of training ranks on nodes of the cluster."""
        return self.trainer.processes - 1 if self.cluster.enabled and self.cluster.ranks == "nodes" else 0

    @property
    def ranks_here(self) -> int:
        """Number of training ranks that are not on nodes of the cluster."""
        return self.trainer.processes - self.ranks_on_nodes

    @property
    def ranks_per_engine(self) -> int:
        """Number of training ranks whose devices an engine uses in turn with them, on a cluster."""
        return max(1, self.gpus_per_engine)

    @property
    def engine_cpus_per_rank(self) -> int:
        """CPUs that a node of the cluster keeps free for engines, for each of its ranks."""
        return math.ceil(self.cluster.cpus_per_replica / self.ranks_per_engine) if self.shares_devices else 0

    def fault_settings(self) -> FaultSettings:
        """Return the scheduler's fault settings. `task_reward.Rewards` enforces the time limit of rewards itself."""
        rollout = self.rollout
        return FaultSettings(
            on_reward_error=rollout.on_reward_error,
            reward_timeout=None,
            outage_limit=rollout.outage_limit,
            max_rejected_groups=rollout.max_rejected_groups or 20 * rollout.rollout_batch_size,
        )

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        rollout = self.rollout
        return SamplingParams(
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=tuple(sorted({*rollout.stop_token_ids, *stop_token_ids})),
            stop=rollout.stop,
            max_turns=self.environment.max_turns if self.environment.enabled else 0,
        )

    def sampling_of_requests(self) -> SamplingParams:
        """Return sampling parameters that every request's log-probabilities must follow: with temperatures of requests,
        one that is not 1."""
        own = self.sampling()
        return replace(own, temperature=COLDEST) if self.gateway.sampling == "request" else own

    def episode_limits(self) -> EpisodeLimits:
        """Return the limits and recovery of episodes."""
        own = self.environment
        return EpisodeLimits(
            recovery=own.recovery,
            on_error=own.on_env_error,
            concurrency=own.concurrency,
            reset_timeout=own.reset_timeout,
            step_timeout=own.step_timeout,
            deadline=PROGRAM_SECONDS if own.episode_deadline is None and own.is_program else own.episode_deadline,
            max_retries=own.max_retries,
            max_restarts=own.max_restarts,
            parallel_turns=own.parallel_turns,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as JSON types."""
        return dataclasses.asdict(self)

    def redacted(self) -> dict[str, Any]:
        """Return the resolved recipe as JSON types without secrets, for files and trackers."""
        settings: dict[str, Any] = redacted(self.to_dict())
        return settings


def typed(kind: Any, value: Any) -> Any:
    """Return `value` converted to the type `kind` by JSON's strict rules: a list may become a tuple and an integer a
    float, but true and "3" are not numbers.

    Raises:
        pydantic.ValidationError: `value` has another type.
    """
    return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `Recipe.to_dict`'s result, for a resumed run."""
    recipe: Recipe = typed(Recipe, settings)
    return recipe
