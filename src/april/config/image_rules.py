"""Rules for recipes whose prompts have images."""

from __future__ import annotations

from april.config.recipe import Recipe


def image_problem(recipe: Recipe) -> str | None:
    """Return the setting with which prompts with images cannot be trained on, and the remedy; None if there is none."""
    engine, trainer = recipe.engine, recipe.trainer
    if recipe.cluster.enabled:
        return "images are not sent to engines on a cluster: remove the section cluster"
    if engine.engine not in ("embedded", "vllm", "sglang"):
        return f'engine.engine = "{engine.engine}" gets no images from april: choose "embedded", "vllm" or "sglang"'
    if engine.weight_transfer == "adapters":
        return 'engine.weight_transfer = "adapters" was not tried with images: choose "disk"'
    if trainer.backend == "megatron":
        return 'trainer.backend = "megatron" does not train on images: choose "fsdp2"'
    for name in ("context_parallel", "tensor_parallel", "expert_parallel"):
        if (size := getattr(trainer, name)) > 1:
            return f"trainer.{name} = {size} does not train on images: leave it out"
    if recipe.environment.enabled and engine.urls and recipe.task.image_column is None:
        return (
            "engine.urls: servers that run already are asked for images only if prompts have some: set "
            "task.image_column, or leave out engine.urls"
        )
    return None
