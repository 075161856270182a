"""`april memory RECIPE`: what a run will hold, by part, before anything is started."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from april.commands.arguments import FLAGS, read_recipe
from april.commands.help import parse
from april.config.error import ConfigError
from april.config.recipe import GPU_SLOTS


@dataclass(kw_only=True)
class MemoryOptions:
    """Say how much memory each process of a run will take, by part, from the recipe and the model's configuration: no
    tokenizer, no weights and no GPU is needed.

    Parameters, gradients and the optimizer are counted; activations are an estimate for a micro-batch of full length.
    What kernels and allocators take on top is left out."""

    gpu_memory: float | None = None
    """Say for GPUs of this many GB whether each phase of a step fits, and what to change first if it does not."""
    model: Literal["qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "r1-distill-1.5b", "glm4-9b"] | None = None
    """A shape in the place of the recipe's own model."""

    def __post_init__(self) -> None:
        if self.gpu_memory is not None and not 0 < self.gpu_memory < float("inf"):
            raise ConfigError(f"--gpu-memory {self.gpu_memory}: must be positive, in GB")


def run(args: list[str]) -> int:
    """`april memory RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, own = (args[:1], args[1:]) if args and not args[0].startswith("-") else ([], args)
    about = f"{inspect.getdoc(MemoryOptions)}\n\n{FLAGS}"
    options, flags = parse(MemoryOptions, f"april memory {path[0] if path else 'RECIPE'}", about, own, rest=True)
    with _shape(options.model) as shape:
        given = [*path, *flags, *(["--model.path", shape] if shape else [])]
        recipe = read_recipe(given, "april memory", loads=False)
        if options.gpu_memory:
            if recipe.model.device == "auto":
                recipe.model.device = "cuda"
            if recipe.engine.max_running == "auto" and recipe.model.on_gpu:
                recipe.engine.max_running = GPU_SLOTS
        from april.training.memory_plan import planned, table
        from april.training.memory_verdict import verdict

        with _known(recipe.model.path) as known:
            recipe.model.path = known or recipe.model.path
            plan = planned(recipe)
            for line in table(plan, recipe):
                print(line)
            for line in verdict(plan, recipe, options.gpu_memory * 1e9) if options.gpu_memory else ():
                print(line)
    return 0


@contextmanager
def _shape(name: str | None) -> Iterator[str | None]:
    """A folder with the configuration of a named shape; None if none is named."""
    if name is None:
        yield None
        return
    from april.simulation.hardware import MODELS
    from april.simulation.model_shape import configuration_of

    with tempfile.TemporaryDirectory() as folder:
        configuration_of(MODELS[name]).save_pretrained(folder)
        yield folder


@contextmanager
def _known(path: str) -> Iterator[str | None]:
    """A folder with the configuration of a hub model whose shape is known here; None for any other."""
    from april.simulation.hardware import MODELS
    from april.simulation.model_shape import HUB

    name = path.rpartition("/")[2].lower()
    name = HUB.get(name, name)
    with _shape(name if name in MODELS and not Path(path).expanduser().is_dir() else None) as folder:
        yield folder
