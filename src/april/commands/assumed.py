"""A model and GPUs described on the command line, which this machine need not have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from april.config.recipe import GPU_SLOTS, Recipe

Shape = Literal["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "r1-distill-1.5b", "glm4-9b"]


def assume_gpus(recipe: Recipe) -> None:
    """Resolve `auto` settings of a recipe as on a machine with GPUs."""
    if recipe.model.device == "auto":
        recipe.model.device = "cuda"
    separate = not recipe.generates_inside and not recipe.engine.own_process
    if recipe.engine.max_num_seqs == "auto" and (recipe.gpus_per_engine > 0 if separate else recipe.model.on_gpu):
        recipe.engine.max_num_seqs = GPU_SLOTS


@contextmanager
def configuration(name: str | None) -> Iterator[str | None]:
    """Yield a directory with the configuration of the named shape; None without a name."""
    if name is None:
        yield None
        return
    from april.simulation.hardware import MODELS
    from april.simulation.model_shape import configuration_of

    with tempfile.TemporaryDirectory() as folder:
        configuration_of(MODELS[name]).save_pretrained(folder)
        yield folder


@contextmanager
def known_model(recipe: Recipe) -> Iterator[None]:
    """Replace a hub model of known shape, inside the block, by a directory with its configuration."""
    from april.simulation.hardware import MODELS
    from april.simulation.model_shape import HUB

    path = recipe.model.path
    name = path.rpartition("/")[2].lower()
    name = HUB.get(name, name)
    with configuration(name if name in MODELS and not Path(path).expanduser().is_dir() else None) as folder:
        recipe.model.path = folder or path
        try:
            yield
        finally:
            recipe.model.path = path
