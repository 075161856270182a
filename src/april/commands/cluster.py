"""`april cluster check RECIPE`: what of a run fits onto the cluster, before anything is started."""

from __future__ import annotations

import asyncio
from pathlib import Path

from april.commands.arguments import read_recipe
from april.commands.failure import fail
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.rollout.engine import EngineError

DESCRIPTION = """Say which engines fit onto which nodes of the recipe's cluster, and what is in the way of others.

RECIPE and the flags are those of april train. Each node that may get engines is asked whether it has april and the
model, and whether its object store holds the weights. Exit status 1 if engines that the recipe asks for do not fit."""


def run(args: list[str]) -> int:
    """`april cluster check RECIPE [FLAGS]`."""
    what, *rest = args or ["nothing"]
    if what in ("-h", "--help"):
        what, rest = "check", [what]
    if what != "check":
        raise ConfigError(f"april cluster {what}: there is only april cluster check RECIPE")
    recipe = read_recipe(rest, "april cluster check", DESCRIPTION)
    if not recipe.cluster.enabled:
        raise ConfigError('cluster.address is not set: "auto" is the cluster that this machine is a node of')
    try:
        return asyncio.run(_check(recipe))
    except EngineError as error:
        return fail(str(error))


async def _check(recipe: Recipe) -> int:
    import torch

    from april.engines.cluster.check import check, lines_of, missing
    from april.engines.cluster.cluster import connected
    from april.engines.cluster.nodes import home
    from april.training.engines import wanted_of
    from april.training.memory_plan import planned

    weights = planned(recipe).parameters * getattr(torch, recipe.engine_dtype).itemsize
    async with connected(recipe.cluster.address):
        wanted = wanted_of(recipe, Path(recipe.reporting.output) / "servers")
        found = await check(wanted, home(), weights)
    for line in lines_of(found, wanted, home()):
        print(line)
    return int(missing(found, wanted))
