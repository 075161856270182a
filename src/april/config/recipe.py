"""A recipe: every setting of a run, by section.

Invariant: a setting has one name, in the file and as a flag: `[rollout] max_staleness` is `--max-staleness`,
`[task] name` is `--task.name`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from pydantic import TypeAdapter

from april.config.settings import (
    AlgorithmSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ReportingSettings,
    RolloutSettings,
    TrainingSettings,
)
from april.rollout.trajectory import SamplingParams
from april.tasks.task import TaskSpec

FLAT: Any = tyro.conf.OmitArgPrefixes
"""Flags of this section carry no prefix."""


@dataclass(kw_only=True)
class Recipe:
    """Every setting of a run, by section."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """What is trained."""
    task: TaskSpec = field(default_factory=lambda: TaskSpec("reasoning_gym", name="gcd"))
    """Problems and rewards."""
    rollout: Annotated[RolloutSettings, FLAT] = field(default_factory=RolloutSettings)
    """How responses are generated."""
    engine: Annotated[EngineSettings, FLAT] = field(default_factory=EngineSettings)
    """What generates them."""
    algorithm: Annotated[AlgorithmSettings, FLAT] = field(default_factory=AlgorithmSettings)
    """What is optimised."""
    training: Annotated[TrainingSettings, FLAT] = field(default_factory=TrainingSettings)
    """How it is optimised."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters."""
    reporting: Annotated[ReportingSettings, FLAT] = field(default_factory=ReportingSettings)
    """What is written, and where."""

    @property
    def over_sampling_batch_size(self) -> int | Literal["auto"]:
        """N' as the policy takes it: the reference's has no way to choose it, and takes 2 N unless it is set."""
        rollout = self.rollout
        if self.first_come and rollout.over_sampling_batch_size == "auto":
            return 2 * rollout.rollout_batch_size
        return rollout.over_sampling_batch_size

    @property
    def max_staleness(self) -> int | None:
        """The bound, which the reference's policy does not have."""
        return None if self.first_come else self.rollout.max_staleness

    @property
    def first_come(self) -> bool:
        """Whether the reference's policy chooses what a step trains on: the groups that are complete first."""
        return self.rollout.policy == "april-paper"

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        rollout = self.rollout
        return SamplingParams(
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=tuple(sorted({*rollout.stop_token_ids, *stop_token_ids})),
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as JSON types."""
        return dataclasses.asdict(self)


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`, for a run that is resumed."""
    return TypeAdapter(Recipe).validate_python(settings)
