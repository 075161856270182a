"""Builder of a run's engine.

Invariant: servers that april starts end with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings.engine_settings import API_KEY
from april.engines.allocator_settings import without_expandable_segments
from april.engines.cuda_ipc import plain_uuid
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.start_gate import StartGate
from april.extras import missing_package
from april.rollout.engine import Engine
from april.training.device_map import device_map, own_gpus
from april.training.kv_budget import kv_cache_bytes
from april.training.offload_plan import share_arguments
from april.training.policy import gpu_bytes
from april.training.rank_protocol import places_of_ranks

if TYPE_CHECKING:
    from april.engines.embedded import EmbeddedEngine
    from april.engines.ray.cluster import EngineSpec
    from april.engines.ray.placement import DevicePlace
    from april.engines.ray.server_actor import RunningServer, ServerSettings
    from april.engines.servers.launch import Server
    from april.engines.servers.server import ServerEngine
    from april.engines.servers.server_routes import ServerRoutes

log = logging.getLogger(__name__)

T = TypeVar("T")


@asynccontextmanager
async def open_engine(
    recipe: Recipe,
    model: Any,
    directory: Path,
    starting: Callable[[str], None] = log.info,
    beside_trainer: bool = False,
    gate: StartGate | None = None,
    keeps_weights: bool = False,
) -> AsyncIterator[Engine]:
    """Open the recipe's engine; it is closed after the block.

    Args:
        model: model for an embedded engine in this process.
        directory: the run's directory, for logs of servers.
        starting: called about every second with a message about servers that are still starting.
        beside_trainer: size the embedded engine's KV cache by the memory that april's own trainer leaves. The memory
            needed by other trainers is unknown, so the cache has the engine's default size with them.
        gate: when servers on the trainer's devices may start.
        keeps_weights: asleep, engines keep their weights in host memory: not all of them are sent.
    """
    settings = recipe.engine
    async with AsyncExitStack() as stack:
        engine: Engine
        if recipe.cluster.enabled:
            logs = directory / "servers"
            engine = await _on_cluster(recipe, stack, starting, logs, gate or StartGate(), keeps_weights)
        elif settings.own_process:
            engine = await _own_process(recipe)
        elif settings.engine == "embedded":
            engine = embedded(recipe, model, beside_trainer)
        elif settings.engine == "vllm-inproc":
            engine = _in_process(recipe, keeps_weights)
        else:
            engine = await _servers(recipe, directory, stack, starting, gate or StartGate(), keeps_weights)
        stack.push_async_callback(engine.close)
        yield engine


def embedded(recipe: Recipe, model: Any, beside_trainer: bool) -> EmbeddedEngine:
    """Return the recipe's embedded engine on `model`, in this process; see `open_engine`."""
    from april.engines.embedded import EmbeddedEngine

    settings, device = recipe.engine, next(model.parameters()).device
    return EmbeddedEngine(
        model,
        max_num_seqs=recipe.slots,
        context_length=settings.context_length,
        kv_cache_bytes=kv_cache_bytes(recipe, device) if beside_trainer else settings.kv_cache_bytes,
        prefill_chunk=settings.prefill_chunk,
        on_update=settings.on_update,
        stream_interval=settings.steps_per_poll,
        router_replay=recipe.training.router_replay,
        stop_token_ids=(),  # samples have their own, and calibration must not stop
    )


async def _own_process(recipe: Recipe) -> Engine:
    from april.engines.embedded.process import EngineProcess

    devices = device_map(recipe)
    own = devices.environment(0) if devices else {}
    device = "cuda" if devices and devices.engines[0] else "cpu"
    return await EngineProcess.start(_elsewhere(recipe, device, recipe.training.threads), own)


def _elsewhere(recipe: Recipe, device: str, threads: int | None) -> EmbeddedSettings:
    """Return the settings of the recipe's embedded engine for another process."""
    settings = recipe.engine
    return EmbeddedSettings(
        model=str(Path(recipe.model.path).expanduser()),
        dtype=recipe.compute_dtype,
        device=device,
        threads=threads,
        max_num_seqs=recipe.slots,
        context_length=settings.context_length,
        kv_cache_bytes=settings.kv_cache_bytes,
        prefill_chunk=settings.prefill_chunk,
        on_update=settings.on_update,
        stream_interval=settings.steps_per_poll,
        router_replay=recipe.training.router_replay,
    )


async def _on_cluster(
    recipe: Recipe,
    stack: AsyncExitStack,
    starting: Callable[[str], None],
    logs: Path,
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
    routes = None if recipe.engine.engine == "embedded" else await asyncio.to_thread(_routes, recipe)
    spec = await call_head(engine_spec_of, recipe, logs, ranks, keeps_weights, routes)
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
        keeps_weights: as of `open_engine`.
        routes: routes that servers are asked for.

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
    device, threads = ("cuda", None) if demand.gpus else ("cpu", own.cpus_per_replica)
    key = os.environ.get(API_KEY) or secrets.token_hex(16)  # other machines reach the servers
    return EngineSpec(
        engine=_server_elsewhere(recipe, demand.gpus, logs, key) if servers else _elsewhere(recipe, device, threads),
        demand=demand,
        replicas=None if own.replicas == "auto" else own.replicas,
        placement=own.placement,
        connect=functools.partial(_connected_elsewhere, recipe, key, False, routes) if servers else None,
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
    key = os.environ.get(API_KEY) or secrets.token_hex(16)  # other machines reach the servers
    return EngineSpec(
        engine=_server_elsewhere(recipe, gpus, logs, key, keeps_weights),
        demand=Demand(own.cpus_per_replica, 0),
        replicas=len(places),
        placement=own.placement,
        connect=functools.partial(_connected_elsewhere, recipe, key, keeps_weights, routes),
        outage_limit=recipe.rollout.outage_limit,
        training=frozenset(rank.node for rank in ranks),
        places=places,
    )


async def _connected_elsewhere(
    recipe: Recipe, key: str, keeps_weights: bool, routes: ServerRoutes | None, server: RunningServer
) -> ServerEngine:
    gpus = tuple(map(plain_uuid, server.gpus))
    return await _connected(recipe, server.url, key, None, keeps_weights, routes, gpus)


def _server_elsewhere(recipe: Recipe, gpus: int, logs: Path, key: str, keeps_weights: bool = False) -> ServerSettings:
    """Return the settings of the recipe's servers for nodes, each with so many GPUs."""
    from april.engines.ray.server_actor import ServerSettings

    settings = recipe.engine
    vllm = settings.engine == "vllm"
    return ServerSettings(
        kind="vllm" if vllm else "sglang",
        model=str(Path(recipe.model.path).expanduser()),
        python=settings.server_python or sys.executable,
        arguments=[*_limits(recipe, vllm, gpus, keeps_weights), *settings.server_args],
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


def _in_process(recipe: Recipe, keeps_weights: bool) -> Engine:
    from april.engines.vllm_inproc import VLLMInProcess

    settings = recipe.engine
    context = {} if settings.context_length is None else {"max_model_len": settings.context_length}
    return VLLMInProcess.load(
        recipe.model.path,
        ignore_eos=True,
        stream_interval=settings.steps_per_poll,
        keeps_weights=keeps_weights,
        dtype=recipe.compute_dtype,
        max_num_seqs=recipe.slots,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        enable_sleep_mode=recipe.shares_devices and recipe.model.on_gpu,
        **context,
    )


async def _servers(
    recipe: Recipe,
    directory: Path,
    stack: AsyncExitStack,
    starting: Callable[[str], None],
    gate: StartGate,
    keeps_weights: bool,
) -> Engine:
    """Connect to servers by their URLs, or start servers here, as one pool whose members may die and come back."""
    try:
        from april.engines.pool import EnginePool
        from april.engines.servers.stream_reader import StreamReader, processes_for
    except ModuleNotFoundError as error:
        raise ConfigError(missing_package(error, f'engine.engine = "{recipe.engine.engine}"')) from None
    settings = recipe.engine
    servers = [] if settings.urls else await _started(recipe, directory, stack, starting, gate, keeps_weights)
    routes = await asyncio.to_thread(_routes, recipe)
    places = [(url, None) for url in settings.urls] or [(server.url, server) for server in servers]
    engines: list[ServerEngine] = []
    readers: list[StreamReader] = []

    async def close_readers() -> None:
        await asyncio.gather(*(reader.close() for reader in readers))

    stack.push_async_callback(close_readers)  # after the engines whose streams they read
    for url, process in places:
        key = os.environ.get(API_KEY)
        engine = await _connected(recipe, url, key, process, keeps_weights, routes)
        stack.push_async_callback(engine.close)
        engines.append(engine)
    count = settings.stream_readers
    if count == "auto":
        count = processes_for(sum(engine.capacity.slots for engine in engines), os.cpu_count() or 1)
    # Extended in place, because `close_readers` closes this list.
    readers += [StreamReader(f"stream reader {index}") for index in range(min(count, len(engines)))]
    for index, engine in enumerate(engines):
        if readers:
            await engine.use_reader(readers[index % len(readers)])
    return EnginePool(engines, patience=recipe.rollout.outage_limit)


async def _connected(
    recipe: Recipe,
    url: str,
    key: str | None,
    process: Server | None = None,
    keeps_weights: bool = False,
    routes: ServerRoutes | None = None,
    gpus: tuple[str, ...] = (),
) -> ServerEngine:
    """Connect to a server of the recipe's kind; `process` is its process if april started it on this machine."""
    from april.engines.servers.sglang import connect_sglang
    from april.engines.servers.vllm import connect_vllm

    settings = recipe.engine
    connect: Callable[..., Awaitable[ServerEngine]] = connect_sglang  # it got `keeps_weights` as an option
    if settings.engine == "vllm":
        connect = functools.partial(connect_vllm, keeps_weights=keeps_weights)
    return await connect(
        url,
        on_update=settings.on_update,
        stream_interval=settings.stream_interval,
        api_key=key,
        process=process,
        shares_devices=recipe.shares_devices,
        routes=routes,
        gpus=gpus,
        sampling=recipe.sampling_of_requests(),
    )


def _routes(recipe: Recipe) -> ServerRoutes | None:
    """Return the routes that servers are asked for; None without router replay."""
    from april.engines.servers.server_routes import ServerRoutes

    setting = recipe.training.router_replay
    return None if setting == "off" else ServerRoutes.of(recipe.model.path, setting == "latest")


async def _started(
    recipe: Recipe,
    directory: Path,
    stack: AsyncExitStack,
    starting: Callable[[str], None],
    gate: StartGate,
    keeps_weights: bool,
) -> list[Any]:
    """Start the recipe's servers concurrently."""
    from april.engines.servers.launch import Launch, launch_sglang, launch_vllm

    settings = recipe.engine
    vllm = settings.engine == "vllm"

    def waiting(server: Server, seconds: float) -> None:
        starting(f"starting {server.name}, {seconds:.0f} s, log: {server.log}")

    launching = []
    devices = device_map(recipe)
    allocator = without_expandable_segments() if recipe.shares_devices else {}
    # Checked before servers load their weights: with different versions the broadcast would fail much later.
    if settings.weight_transfer == "broadcast" and devices and devices.training and settings.server_python:
        await asyncio.to_thread(_require_same_nccl, settings.server_python)
    for index, name in enumerate(recipe.engines_here):
        limits = _limits(recipe, vllm, len(devices.engines[index]) if devices else 0, keeps_weights)
        how = Launch(
            log_dir=directory / "servers",
            name=name,
            python=settings.server_python or sys.executable,
            arguments=[*limits, *settings.server_args],
            environment={**(devices.environment(index) if devices else {}), **allocator},
            gpus=tuple(plain_uuid(gpu.uuid) for gpu in devices.engines[index]) if devices else (),
            gate=gate,
            host=settings.server_host,
            api_key=os.environ.get(API_KEY),
            ready_timeout=settings.ready_timeout,
            waiting=waiting,
        )
        broadcast, ipc = (settings.weight_transfer == transfer for transfer in ("broadcast", "ipc"))
        model = recipe.model.path
        launching.append(launch_vllm(model, how, broadcast=broadcast, ipc=ipc) if vllm else launch_sglang(model, how))
    return await _all_entered(launching, stack)


def _require_same_nccl(python: str) -> None:
    """Check that servers of another Python environment have the trainer's NCCL version; others do not connect.

    Raises:
        ConfigError: the versions differ.
    """
    from april.engines.servers.installed import SAME_NCCL, installed, installed_in, nccl_versions

    if versions := nccl_versions(installed(), installed_in(python)):
        own, theirs = versions
        raise ConfigError(
            f"engine.server_python = {python!r} has NCCL {theirs} and april {own}, which do not connect: {SAME_NCCL}"
        )


async def _all_entered(contexts: Iterable[AbstractAsyncContextManager[T]], stack: AsyncExitStack) -> list[T]:
    """Enter all contexts concurrently, onto `stack`; if one fails, cancel the others."""
    try:
        async with asyncio.TaskGroup() as group:
            entering = [group.create_task(stack.enter_async_context(context)) for context in contexts]
    except ExceptionGroup as failures:
        # Callers handle the error's own type, such as EngineError, and not a group of errors.
        raise failures.exceptions[0] from None
    return [task.result() for task in entering]


def _limits(recipe: Recipe, vllm: bool, gpus: int, keeps_weights: bool = False) -> list[str]:
    """Return the options of a server that a recipe decides: its size and its division among GPUs."""
    from april.engines.servers.sglang import SGLang
    from april.engines.servers.vllm import VLLM

    settings = recipe.engine
    arguments = ["--dtype", recipe.compute_dtype]
    if recipe.training.router_replay != "off":
        arguments.append("--enable-return-routed-experts")
    arguments += ["--max-num-seqs" if vllm else "--max-running-requests", str(recipe.slots)]
    if gpus > 1 and settings.gpus_by_arguments is None:
        arguments += ["--tensor-parallel-size" if vllm else "--tp-size", str(gpus)]
    # Servers on CPUs refuse the option; their calls work without it, and release nothing.
    if recipe.shares_devices and gpus:
        arguments += [VLLM.flag if vllm else SGLang.flag, *share_arguments(recipe, gpu_bytes(recipe.model))]
        arguments += [SGLang.keeping] if keeps_weights and not vllm else []
    if settings.context_length is not None:
        arguments += ["--max-model-len" if vllm else "--context-length", str(settings.context_length)]
    return arguments
