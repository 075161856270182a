"""Builder of a run's engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from april.config.recipe import Recipe
from april.engines.start_gate import StartGate
from april.images.store import ImageStore
from april.rollout.engine import Engine
from april.training.cluster_engines import open_on_cluster
from april.training.embedded_engine import embedded, open_own_process
from april.training.server_engines import open_servers

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_engine(
    recipe: Recipe,
    model: Any,
    directory: Path,
    starting: Callable[[str], None] = log.info,
    beside_trainer: bool = False,
    gate: StartGate | None = None,
    keeps_weights: bool = False,
    images: ImageStore | None = None,
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
        images: images of prompts, for an embedded engine in this process and for servers.
    """
    settings, gate = recipe.engine, gate or StartGate()
    async with AsyncExitStack() as stack:
        engine: Engine
        if recipe.cluster.enabled:
            engine = await open_on_cluster(recipe, directory, stack, starting, gate, keeps_weights)
        elif settings.own_process:
            engine = await open_own_process(recipe)
        elif settings.engine == "embedded":
            engine = embedded(recipe, model, beside_trainer, images)
        elif settings.engine == "vllm-inproc":
            engine = _in_process(recipe, keeps_weights)
        else:
            engine = await open_servers(recipe, directory, stack, starting, gate, keeps_weights, images)
        stack.push_async_callback(engine.close)
        yield engine


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
