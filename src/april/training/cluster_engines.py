"""The recipe's engines on the nodes of a cluster, with devices of their own or on the devices of ranks."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings.engine_settings import API_KEY
from april.engines.cuda_ipc import plain_uuid
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.start_gate import StartGate
from april.rollout.engine import Engine
from april.training.device_map import own_gpus
from april.training.embedded_engine import embedded_settings
from april.training.rank_protocol import places_of_ranks
from april.training.server_engines import connected_server, routes_of_servers, server_options

if TYPE_CHECKING:
    from april.engines.ray.cluster import EngineSpec
    from april.engines.ray.placement import DevicePlace
    from april.engines.ray.server_actor import RunningServer, ServerSettings
    from april.engines.ray.server_replica import Connect
    from april.engines.servers.server import ServerEngine
    from april.engines.servers.server_routes import ServerRoutes


async def open_on_cluster(
    recipe: Recipe,
    directory: Path,
    stack: AsyncExitStack,
    starting: Callable[[str], None],
    gate: StartGate,
    keeps_weights: bool,
) -> Engine:
    """Start engines on the nodes of a cluster, as one pool."""
    from april.engines.ray.cluster import Cluster
    from april.engines.ray.driver import connected
    from april.engines.ray.head import call_head

    await stack.enter_async_context(connected(recipe.cluster.address))
    ranks = training_places(recipe) if recipe.shares_devices else []
    # Once, and in a thread: for the shape of the routes, the whole model is built, without memory.
    routes = None if recipe.engine.engine == "embedded" else await asyncio.to_thread(routes_of_servers, recipe)
    spec = await call_head(engine_spec_of, recipe, directory / "servers", ranks, keeps_weights, routes)
    cluster = Cluster(replace(spec, gate=gate))
    pool = await cluster.start(starting)
    watching = asyncio.create_task(cluster.watch(pool), name="watch of the cluster")
    stack.callback(watching.cancel)
    return pool


def training_places(recipe: Recipe) -> list[DevicePlace]:
    """Return the devices of the run's ranks on the cluster to which this process, rank 0, is connected.

    Raises:
        ConfigError: GPUs of ranks on this machine cannot be counted, or are too few.
    """
    from april.engines.ray.nodes import home
    from april.engines.ray.placement import DevicePlace

    own = [DevicePlace(home(), (gpu.id,)) for gpu in own_gpus(recipe)] or [DevicePlace(home())] * recipe.ranks_here
    return own + [DevicePlace(*place) for place in places_of_ranks()]


def engine_spec_of(
    recipe: Recipe,
    logs: Path,
    ranks: Sequence[DevicePlace] = (),
    keeps_weights: bool = False,
    routes: ServerRoutes | None = None,
) -> EngineSpec:
    """Return the engines that a recipe requests from the cluster to which this process is connected.

    Args:
        logs: folder of the servers' logs.
        ranks: devices of all ranks, if engines use them in turn with the ranks.
        keeps_weights: see `engine_builder.open_engine`.
        routes: routes to request from servers.

    Raises:
        ConfigError: engines do not fit onto the devices of ranks.
    """
    from april.engines.ray.cluster import EngineSpec
    from april.engines.ray.driver import demand_of

    own, servers = recipe.cluster, recipe.engine.engine != "embedded"
    if recipe.shares_devices:
        return _spec_on_ranks(recipe, logs, ranks, keeps_weights, routes)
    gpus = recipe.engine.gpus_by_arguments or recipe.engine.gpus_per_replica
    # An embedded engine computes on the recipe's device; servers choose theirs themselves.
    without = gpus == "auto" and not servers and recipe.model.device == "cpu"
    demand = demand_of(own.cpus_per_replica, 0 if without else gpus)
    engine: ServerSettings | EmbeddedSettings
    connect: Connect | None = None
    if servers:
        engine, connect = _servers(recipe, demand.gpus, logs, False, routes)
    elif demand.gpus:
        engine = embedded_settings(recipe, "cuda", None)
    else:
        engine = embedded_settings(recipe, "cpu", own.cpus_per_replica)
    return EngineSpec(
        engine=engine,
        demand=demand,
        replicas=None if own.replicas == "auto" else own.replicas,
        placement=own.placement,
        connect=connect,
        outage_limit=recipe.rollout.outage_limit,
        training=frozenset(node for node, _ in places_of_ranks()),
    )


def _spec_on_ranks(
    recipe: Recipe, logs: Path, ranks: Sequence[DevicePlace], keeps_weights: bool, routes: ServerRoutes | None
) -> EngineSpec:
    """Return the engines on the devices of ranks, which Ray has assigned to the ranks: engines reserve CPUs alone."""
    from april.engines.ray.cluster import EngineSpec
    from april.engines.ray.placement import Demand, engine_places

    own, each = recipe.cluster, recipe.ranks_per_engine
    places = engine_places(ranks, each, None if own.replicas == "auto" else own.replicas)
    if len(places) < recipe.engines_beside:
        raise ConfigError(
            f'trainer.layout = "shared": {len(places)} engines fit onto the nodes of {len(ranks)} ranks, where each '
            f"takes the devices of {each} ranks of one node: lower cluster.replicas or engine.gpus_per_replica"
        )
    if recipe.engine.weight_transfer == "ipc" and len(places) * each != len(ranks):
        raise ConfigError(
            f'engine.weight_transfer = "ipc": {len(places)} engines use the devices of {len(places) * each} of '
            f'{len(ranks)} ranks, and each rank needs an engine that reads its memory; choose "disk"'
        )
    gpus = recipe.gpus_per_engine if recipe.model.on_gpu else 0
    engine, connect = _servers(recipe, gpus, logs, keeps_weights, routes)
    return EngineSpec(
        engine=engine,
        demand=Demand(own.cpus_per_replica, 0),
        replicas=len(places),
        placement=own.placement,
        connect=connect,
        outage_limit=recipe.rollout.outage_limit,
        training=frozenset(rank.node for rank in ranks),
        places=places,
    )


def _servers(
    recipe: Recipe, gpus: int, logs: Path, keeps_weights: bool, routes: ServerRoutes | None
) -> tuple[ServerSettings, Connect]:
    """Return the settings of the recipe's servers for nodes, and the function that connects to one.

    Args:
        gpus: number of GPUs of each server.
    """
    from april.engines.ray.server_actor import ServerSettings

    settings = recipe.engine
    vllm = settings.engine == "vllm"
    key = os.environ.get(API_KEY) or secrets.token_hex(16)  # other machines reach the servers
    elsewhere = ServerSettings(
        kind="vllm" if vllm else "sglang",
        model=str(Path(recipe.model.path).expanduser()),
        python=settings.server_python or sys.executable,
        arguments=[*server_options(recipe, vllm, gpus, keeps_weights), *settings.server_args],
        log_dir=logs.absolute(),
        api_key=key,
        max_num_seqs=recipe.slots,
        context_length=settings.context_length,
        on_update=settings.on_update,
        ready_timeout=settings.ready_timeout,
        broadcast=vllm and settings.weight_transfer == "broadcast",
        ipc=vllm and settings.weight_transfer == "ipc",
        shares_devices=recipe.shares_devices,
    )
    return elsewhere, functools.partial(_connected, recipe, key, keeps_weights, routes)


async def _connected(
    recipe: Recipe, key: str, keeps_weights: bool, routes: ServerRoutes | None, server: RunningServer
) -> ServerEngine:
    gpus = tuple(map(plain_uuid, server.gpus))
    return await connected_server(recipe, server.url, key, keeps_weights, routes, gpus=gpus)
