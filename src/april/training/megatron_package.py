"""Check for the packages of the Megatron backend, before a model is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from april.config.error import ConfigError

MEGATRON = ("megatron-core", "megatron-bridge")


def check_megatron(backend: str) -> None:
    """Check that Megatron is installed if `backend` is "megatron".

    Raises:
        ConfigError: it is not installed.
    """
    if backend != "megatron":
        return
    for package in MEGATRON:
        try:
            version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f'trainer.backend = "megatron" needs {package}, which is not installed here: start april in an '
                "environment that has it (docs/distributed.md, Megatron); scripts/setup_megatron.sh makes one for CPUs"
            ) from None
