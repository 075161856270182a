"""`april memory RECIPE`: what a run will hold, by part, before anything is started."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from april.commands.arguments import FLAGS, read_recipe
from april.commands.assumed import Shape, assume_gpus, configuration, known_model
from april.commands.help import parse
from april.config.error import ConfigError


@dataclass(kw_only=True)
class MemoryOptions:
    """Say how much memory each process of a run will take, by part, from the recipe and the model's configuration: no
    tokenizer, no weights and no GPU is needed.

    Parameters, gradients and the optimizer are counted; activations are an estimate for a micro-batch of full length.
    What kernels and allocators take on top is left out."""

    gpu_memory: float | None = None
    """Say for GPUs of this many GB whether each phase of a step fits, and what to change first if it does not."""
    model: Shape | None = None
    """A shape in the place of the recipe's own model."""

    def __post_init__(self) -> None:
        if self.gpu_memory is not None and not 0 < self.gpu_memory < float("inf"):
            raise ConfigError(f"--gpu-memory {self.gpu_memory}: must be positive, in GB")


def run(args: list[str]) -> int:
    """`april memory RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, own = (args[:1], args[1:]) if args and not args[0].startswith("-") else ([], args)
    about = f"{inspect.getdoc(MemoryOptions)}\n\n{FLAGS}"
    options, flags = parse(MemoryOptions, f"april memory {path[0] if path else 'RECIPE'}", about, own, rest=True)
    with configuration(options.model) as shape:
        given = [*path, *flags, *(["--model.path", shape] if shape else [])]
        recipe = read_recipe(given, "april memory", loads=False)
        if options.gpu_memory:
            assume_gpus(recipe)
        from april.training.memory_check import verdict
        from april.training.memory_plan import plan_memory, table

        with known_model(recipe):
            plan = plan_memory(recipe)
            for line in table(plan, recipe):
                print(line)
            for line in verdict(plan, recipe, options.gpu_memory * 1e9) if options.gpu_memory else ():
                print(line)
    return 0
