"""`april memory RECIPE`: what a run will hold, by part, before anything is started."""

from __future__ import annotations

from april.commands.arguments import read_recipe

DESCRIPTION = """Say how much memory each process of a run will take, by part, without loading its model.

RECIPE and the flags are those of april train. Parameters, gradients and the optimizer are counted; activations are an
estimate for a micro-batch of full length. What kernels and allocators take on top is left out."""


def run(args: list[str]) -> int:
    """`april memory RECIPE [FLAGS]`."""
    recipe = read_recipe(args, "april memory", DESCRIPTION)
    from april.training.memory_plan import planned, table

    for line in table(planned(recipe), recipe):
        print(line)
    return 0
