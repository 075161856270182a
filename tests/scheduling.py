"""A scheduler from settings by name, from any section, so that a test names only the settings that it needs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

from april import Engine, FaultSettings, Prompt, RolloutParams, RolloutScheduler
from april.rollout.batch import RolloutBatch
from april.rollout.journal.journal import Journal

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


async def trained_from(
    rollouts: RolloutScheduler, journal: Journal, steps: int, ticks: int | None
) -> list[RolloutBatch]:
    """Return the batches of these steps, of which the journal has some; work ends after `ticks` turns of the loop."""
    collected: list[RolloutBatch] = []

    async def work() -> None:
        journal.seek(None)
        for _ in range(steps):
            collected.append(await rollouts.next_batch())
            await rollouts.update_weights()

    task = asyncio.create_task(work())
    if ticks is not None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=ticks is not None)
    return collected
