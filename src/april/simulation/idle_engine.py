"""The engine of a recipe, started for measurements only."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from april.config.recipe import Recipe
from april.images.store import ImageStore, NoImages
from april.rollout.engine import Engine
from april.simulation.calibration import Calibration
from april.simulation.measurement import Update
from april.simulation.sweep import calibrate


@dataclass(frozen=True)
class IdleEngine:
    """The engine of a recipe on the recipe's policy, not used by anything else."""

    recipe: Recipe
    model: Any
    tokenizer: Any
    engine: Engine
    update: Update
    images: ImageStore | NoImages

    async def calibrate(self, longest: int, repeats: int, progress: Callable[[str], None]) -> Calibration:
        return await calibrate(
            self.engine,
            self.update,
            on_update=self.recipe.engine.on_update,
            longest=longest,
            repeats=repeats,
            vocabulary=self.model.config.get_text_config().vocab_size,
            progress=progress,
        )


@asynccontextmanager
async def idle_engine(recipe: Recipe) -> AsyncIterator[IdleEngine]:
    """Start the recipe's engine, and stop it afterwards."""
    from april.training.engine_builder import open_engine
    from april.training.learner_settings import LearnerSettings
    from april.training.policy import load_policy
    from april.training.run_images import run_images
    from april.training.weight_transfer import model_transfer

    model, tokenizer = load_policy(recipe.model)
    with tempfile.TemporaryDirectory() as folder:
        directory, recipe = Path(folder), copy.deepcopy(recipe)
        recipe.reporting.output = folder  # episodes keep their images there
        images = run_images(recipe)
        own = LearnerSettings.of(recipe)
        transfer = model_transfer(own.engine, model, tokenizer, directory, cluster_dtype=own.cluster_dtype)
        store = images if isinstance(images, ImageStore) else None
        async with open_engine(recipe, model, directory, images=store) as engine:

            async def update(version: int) -> None:
                await engine.update_weights(version, transfer.offer(version))

            yield IdleEngine(recipe, model, tokenizer, engine, update, images)


async def calibrate_recipe(recipe: Recipe, longest: int, repeats: int) -> Calibration:
    """Start the recipe's engine, measure it, and stop it."""
    async with idle_engine(recipe) as idle:
        with Console(stderr=True).status("") as status:
            return await idle.calibrate(longest, repeats, status.update)
