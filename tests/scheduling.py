"""A scheduler from settings by name, from any section, so that a test names only the settings that it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from april import Engine, FaultSettings, Prompt, RolloutParams, RolloutScheduler

PARAMS = {field.name for field in dataclasses.fields(RolloutParams)}
FAULTS = {field.name for field in dataclasses.fields(FaultSettings)}


def by_home(settings: dict[str, Any]) -> tuple[RolloutParams, dict[str, Any]]:
    """The parameters among `settings`, and the other arguments of a scheduler."""
    params = RolloutParams(**{name: settings[name] for name in settings.keys() & PARAMS})
    faults = FaultSettings(**{name: settings[name] for name in settings.keys() & FAULTS})
    return params, {"faults": faults} | {name: settings[name] for name in settings.keys() - PARAMS - FAULTS}


def scheduler_of(engine: Engine, prompts: Iterable[Prompt], reward: Any, **settings: Any) -> RolloutScheduler:
    params, others = by_home(settings)
    return RolloutScheduler(engine, prompts, reward, params, **others)
