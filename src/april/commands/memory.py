"""`april memory RECIPE`: memory of a run by part, before anything is started."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from april.commands.arguments import FLAGS, read_recipe
from april.commands.assumed import Shape, assume_gpus, configuration, known_model
from april.commands.help import parse
from april.config.error import ConfigError


@dataclass(kw_only=True)
class MemoryOptions:
    """Print the memory of each process of a run, by part, from the recipe and the model's configuration. Tokenizer,
    weights and GPU are not needed.

    Parameters, gradients and optimizer state are counted; activations are an estimate for a micro-batch of full length.
    The additional memory of kernels and allocators is not included."""

    gpu_memory: float | None = None
    """GPU memory in GB: print whether each phase of a step fits, and the first remedy if it does not."""
    model: Shape | None = None
    """Model shape that replaces the recipe's model."""

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
