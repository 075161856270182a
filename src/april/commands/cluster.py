"""`april cluster check RECIPE`: check which engines and ranks fit onto a cluster, before anything is started."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import nullcontext
from pathlib import Path

from april.commands.arguments import check_context, read_recipe
from april.commands.failure import fail
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.rollout.engine import EngineError

DESCRIPTION = """List the engines and ranks that fit onto each node of the recipe's cluster, and the obstacles.

RECIPE and flags are the same as for april train. The command checks on each candidate node: april and the model are
installed; for engines, the object store can hold the weights; for ranks, the node shares the run's directory; with
cluster.environments = "nodes", the node can construct an environment. Exit status 1 if the recipe's engines and ranks
do not fit or a node cannot construct an environment."""


def run(args: list[str]) -> int:
    """`april cluster check RECIPE [FLAGS]`."""
    what, *rest = args or [""]
    if what in ("-h", "--help"):
        what, rest = "check", [what]
    if what != "check":
        raise ConfigError(f"{f'april cluster {what}'.strip()}: there is only april cluster check RECIPE")
    recipe = read_recipe(rest, "april cluster check", DESCRIPTION)
    if not recipe.cluster.enabled:
        raise ConfigError('cluster.address is not set: "auto" is the cluster that this machine is a node of')
    check_context(recipe.model, recipe.rollout, recipe.engine)
    try:
        return asyncio.run(_check(recipe))
    except EngineError as error:
        return fail(str(error))


async def _check(recipe: Recipe) -> int:
    from april.engines.ray.driver import connected

    async with connected(recipe.cluster.address):  # first: what follows imports torch, which takes seconds
        import torch

        from april.engines.ray.node_report import RankSpec, check, lines_of, missing
        from april.engines.ray.node_requirements import NodeRequirements, marked
        from april.engines.ray.nodes import home, nodes_now
        from april.engines.ray.placement import DevicePlace, pack
        from april.training.cluster_engines import engine_spec_of
        from april.training.environment_setup import environment_source
        from april.training.memory_plan import plan_memory
        from april.training.rank_nodes import demand_of_rank, model_of

        weights = plan_memory(recipe).parameters * getattr(torch, recipe.compute_dtype).itemsize
        ranks, output = None, Path(recipe.reporting.output).absolute()
        with marked(output) if recipe.ranks_on_nodes else nullcontext() as marker:
            if recipe.ranks_on_nodes:
                needs = NodeRequirements(model_of(recipe.model), output, marker)
                demand = demand_of_rank(recipe.cluster, recipe.model)
                ranks = RankSpec(recipe.ranks_on_nodes, demand, needs, recipe.engine_cpus_per_rank)
            placed = pack(nodes_now(), ranks.room, ranks.count, home()) if ranks else []
            places = [DevicePlace(node) for node in [home()] * (recipe.trainer.processes - len(placed)) + placed]
            wanted = engine_spec_of(recipe, Path(recipe.reporting.output) / "servers", places)
            environment = (
                pickle.dumps(environment_source(recipe.environment)) if recipe.cluster.environments == "nodes" else None
            )
            found = await check(wanted, home(), weights, ranks, environment)
        for line in lines_of(found, wanted, home(), ranks):
            print(line)
    return int(missing(found, wanted, ranks))
