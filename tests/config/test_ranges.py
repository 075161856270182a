"""The numbers that a setting may be are in its type."""

from __future__ import annotations

import dataclasses
import math

import pytest

from april.config.ranges import out_of_range
from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.environment_settings import EnvironmentSettings
from april.config.settings.lora_settings import LoraSettings
from april.config.settings.rollout_settings import RolloutSettings
from april.config.settings.trainer_settings import TrainerSettings
from april.config.settings.training_settings import TrainingSettings

SECTIONS = [getattr(Recipe(), section.name) for section in dataclasses.fields(Recipe)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (TrainingSettings(learning_rate=0.0), ("learning_rate", "must be positive")),
        (TrainingSettings(warmup_steps=-1), ("warmup_steps", "must not be negative")),
        (TrainingSettings(threads=0), ("threads", "must be positive")),
        (RolloutSettings(over_sampling_batch_size=0), ("over_sampling_batch_size", "must be positive")),
        (RolloutSettings(temperature=math.inf), ("temperature", "must be a finite number")),
        (AlgorithmSettings(value_clip=-math.inf), ("value_clip", "must be a finite number")),
        (AlgorithmSettings(value_clip=0.0), ("value_clip", "must be positive (inf is no bound)")),
        (LoraSettings(rank=-1), ("rank", "must not be negative")),
        (TrainingSettings(steps=10**400), ("steps", "must fit into 64 bits")),
        (TrainingSettings(journal_flush_seconds=1e10), ("journal_flush_seconds", "must be seconds from 0 to a year")),
        (TrainingSettings(betas=(0.5, math.nan)), ("betas", "must be a finite number")),
        (TrainerSettings(rank_timeout=1e10), ("rank_timeout", "must be positive seconds, a year at most")),
        (EnvironmentSettings(step_timeout=1e10), ("step_timeout", "must be positive seconds, a year at most")),
        (AlgorithmSettings(eps_low=1e300), ("eps_low", "must fit into a float of 32 bits")),
        (EngineSettings(kv_cache_gb=1e300), ("kv_cache_gb", "must fit into a float of 32 bits")),
        (EngineSettings(kv_cache_gb=1e9), ("kv_cache_gb", "must be positive gigabytes, a million at most")),
        (EngineSettings(gpu_memory_utilization=1.2), ("gpu_memory_utilization", "must be a share above 0, at most 1")),
        (RolloutSettings(outage_limit=1e10), ("outage_limit", "must be positive seconds, a year at most")),
        (AlgorithmSettings(gamma=1.5), ("gamma", "must lie in [0, 1]")),
        (RolloutSettings(reward_workers=5000), ("reward_workers", "must be from 0 to 4,096")),
        (TrainerSettings(processes=0), ("processes", "must be from 1 to 4,096")),
        (RolloutSettings(stop_token_ids=(1, -1)), ("stop_token_ids", "must not be negative")),
    ],
)
def test_a_number_outside_its_range_is_named(settings: object, problem: tuple[str, str]) -> None:
    assert list(out_of_range(settings)) == [problem]


def test_no_bound_is_inf() -> None:
    names = ("value_clip", "correction_cap", "correction_high", "eps_low", "eps_high")
    assert not list(out_of_range(AlgorithmSettings(**dict.fromkeys(names, math.inf))))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: type(section).__name__)
def test_the_defaults_are_in_range_and_no_number_is_nan(section: object) -> None:
    assert not list(out_of_range(section))
    for setting in dataclasses.fields(section):  # type: ignore[arg-type]
        if isinstance(getattr(section, setting.name), float):
            assert list(out_of_range(dataclasses.replace(section, **{setting.name: math.nan})))  # type: ignore[type-var]
