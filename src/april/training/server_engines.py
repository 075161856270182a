"""The recipe's servers: their options, their start on this machine, and the connection to them.

Invariant: servers that april starts end with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings.engine_settings import API_KEY
from april.engines.allocator_settings import without_expandable_segments
from april.engines.cuda_ipc import plain_uuid
from april.engines.start_gate import StartGate
from april.extras import missing_package
from april.images.store import ImageStore
from april.rollout.engine import Engine
from april.training.device_map import device_map
from april.training.offload_plan import share_arguments
from april.training.policy import gpu_bytes

if TYPE_CHECKING:
    from april.engines.servers.launch import Server
    from april.engines.servers.sent_images import SentImages
    from april.engines.servers.server import ServerEngine
    from april.engines.servers.server_routes import ServerRoutes

T = TypeVar("T")


async def open_servers(
    recipe: Recipe,
    directory: Path,
    stack: AsyncExitStack,
    starting: Callable[[str], None],
    gate: StartGate,
    keeps_weights: bool,
    images: ImageStore | None,
) -> Engine:
    """Connect to servers by their URLs, or start servers here, as one pool whose members may die and come back."""
    try:
        from april.engines.pool import EnginePool
        from april.engines.servers.stream_reader import StreamReader, processes_for
    except ModuleNotFoundError as error:
        raise ConfigError(missing_package(error, f'engine.engine = "{recipe.engine.engine}"')) from None
    settings = recipe.engine
    # Later turns of an episode may have images although no prompt has any; a server that runs already may be for text.
    later = recipe.environment.enabled and not settings.urls
    expected = images is not None and (images.used or later)
    if settings.urls:
        servers = []
    else:
        servers = await _started(recipe, directory, stack, starting, gate, keeps_weights, expected)
    sent = None
    if images is not None:
        from april.engines.servers.sent_images import SentImages

        sent = SentImages(str(Path(recipe.model.path).expanduser()), expected, images)
    routes = await asyncio.to_thread(routes_of_servers, recipe)
    places = [(url, None) for url in settings.urls] or [(server.url, server) for server in servers]
    engines: list[ServerEngine] = []
    readers: list[StreamReader] = []

    async def close_readers() -> None:
        await asyncio.gather(*(reader.close() for reader in readers))

    stack.push_async_callback(close_readers)  # after the engines whose streams they read
    for url, process in places:
        key = os.environ.get(API_KEY)
        engine = await connected_server(recipe, url, key, keeps_weights, routes, process=process, images=sent)
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


async def connected_server(
    recipe: Recipe,
    url: str,
    key: str | None,
    keeps_weights: bool,
    routes: ServerRoutes | None,
    process: Server | None = None,
    gpus: tuple[str, ...] = (),
    images: SentImages | None = None,
) -> ServerEngine:
    """Connect to a server of the recipe's kind.

    Args:
        key: sent as a bearer token.
        keeps_weights: see `engine_builder.open_engine`.
        routes: routes to request, for router replay.
        process: the server's process, if april started it on this machine.
        gpus: UUIDs of the server's GPUs if it is elsewhere; empty if unknown.
        images: images of prompts.
    """
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
        images=images,
        gpus=gpus,
        sampling=recipe.sampling_of_requests(),
    )


def routes_of_servers(recipe: Recipe) -> ServerRoutes | None:
    """Return the routes to request from servers; None without router replay."""
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
    images: bool,
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
        options = server_options(recipe, vllm, len(devices.engines[index]) if devices else 0, keeps_weights, images)
        how = Launch(
            log_dir=directory / "servers",
            name=name,
            python=settings.server_python or sys.executable,
            arguments=[*options, *settings.server_args],
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


def server_options(
    recipe: Recipe, vllm: bool, gpus: int, keeps_weights: bool = False, images: bool = False
) -> list[str]:
    """Return the options of a server that a recipe decides: its size and its division among GPUs.

    Args:
        images: prompts have images.
    """
    from april.engines.servers.server_routes import FLAG
    from april.engines.servers.sglang import SGLang
    from april.engines.servers.sglang_images import CACHE_MB, KEEPS_IDS
    from april.engines.servers.vllm import OWN_PIXELS, VLLM

    settings = recipe.engine
    arguments = ["--dtype", recipe.compute_dtype]
    if recipe.training.router_replay != "off":
        arguments.append(FLAG)
    if images:
        arguments += [OWN_PIXELS] if vllm else [KEEPS_IDS, str(CACHE_MB)]
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
