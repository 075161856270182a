"""The recipe's embedded engine, in this process or in another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.config.recipe import Recipe
from april.engines.embedded.settings import EmbeddedSettings
from april.images.store import ImageStore
from april.rollout.engine import Engine
from april.training.device_map import device_map
from april.training.kv_budget import kv_cache_bytes
from april.training.run_images import kept_images

if TYPE_CHECKING:
    from april.engines.embedded import EmbeddedEngine


def embedded(recipe: Recipe, model: Any, beside_trainer: bool, images: ImageStore | None = None) -> EmbeddedEngine:
    """Return the recipe's embedded engine on `model`, in this process; see `engine_builder.open_engine`."""
    device = next(model.parameters()).device
    cache = kv_cache_bytes(recipe, device) if beside_trainer else recipe.engine.kv_cache_bytes
    return embedded_settings(recipe, device.type, recipe.training.threads).engine(model, cache, images)


async def open_own_process(recipe: Recipe) -> Engine:
    """Start the recipe's embedded engine in a process of its own on this machine."""
    from april.engines.embedded.process import EngineProcess

    devices = device_map(recipe)
    own = devices.environment(0) if devices else {}
    device = "cuda" if devices and devices.engines[0] else "cpu"
    return await EngineProcess.start(embedded_settings(recipe, device, recipe.training.threads), own)


def embedded_settings(recipe: Recipe, device: str, threads: int | None) -> EmbeddedSettings:
    """Return the settings of the recipe's embedded engine."""
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
        kept_images=kept_images(recipe),
    )
