"""Router replay in training: the routes of a step's samples, checked against the policy's routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.config.error import ConfigError
from april.engines.routers import RouterReplay
from april.rollout.trajectory.routes import Experts
from april.rollout.trajectory.routes import RouterReplay as Setting
from april.rollout.trajectory.sample import Sample


def router_replay(model: Any, setting: Setting) -> RouterReplay | None:
    """Return the replay of a policy's routers; None if the setting is "off".

    Raises:
        ConfigError: the policy has no routers that april knows.
    """
    if setting == "off":
        return None
    try:
        return RouterReplay(model)
    except ValueError as error:
        raise ConfigError(f'training.router_replay = "{setting}": {error}; set it to "off"') from None


def replayed_routes(samples: Sequence[Sample], replay: RouterReplay) -> tuple[Experts | None, ...]:
    """Return the routes of samples, without copies.

    Raises:
        ValueError: routes of another model; the message names the sample.
    """
    return tuple(None if sample.routes is None else _checked(sample, replay) for sample in samples)


def _checked(sample: Sample, replay: RouterReplay) -> Experts:
    assert sample.routes is not None
    shape, experts = replay.shape, sample.routes.experts
    if experts.shape[1:] != (shape.layers, shape.top_k) or experts.dtype != shape.dtype:
        raise ValueError(f"sample {sample.id}: {sample.routes!r} came, but the policy has {shape}: {_REMEDY}")
    known = experts[sample.routes.known]
    if known.size and (highest := int(known.max())) >= shape.experts:
        raise ValueError(f"sample {sample.id}: expert {highest} came, but the policy has {shape}: {_REMEDY}")
    return experts


_REMEDY = "engines have to serve the policy's architecture"


def missing_routes(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of consumed tokens whose routes are unknown, as a metric: the router chooses their experts."""
    consumed = sum(len(sample.prompt_ids) + sample.length - 1 for sample in samples)
    return {"missing_routes": sum(sample.missing_routes for sample in samples) / max(consumed, 1)}
