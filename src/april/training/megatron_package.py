"""What a backend needs of the environment that it is started in, seen before anything is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from april.config.error import ConfigError
from april.config.recipe import Recipe

MEGATRON = ("megatron-core", "megatron-bridge")


def check_megatron(recipe: Recipe) -> None:
    """See that Megatron is installed, if the recipe trains with it.

    Raises:
        ConfigError: it is not.
    """
    if recipe.trainer.backend != "megatron":
        return
    for package in MEGATRON:
        try:
            version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f'trainer.backend = "megatron" needs {package}, which is not installed here: start april in an '
                "environment that has it (docs/distributed.md, Megatron); scripts/setup_megatron.sh makes one for CPUs"
            ) from None
