"""The hardware of this machine that a recipe's defaults depend on."""

from __future__ import annotations

from april.config.error import ConfigError
from april.engines import gpus
from april.engines.gpus import Gpu
from april.rollout.engine import EngineError


def visible_gpus() -> list[Gpu]:
    """Return the GPUs visible to this process.

    Raises:
        ConfigError: they cannot be counted.
    """
    try:
        return gpus.visible()
    except EngineError as error:
        raise ConfigError(str(error)) from None
