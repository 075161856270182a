"""Rules for the settings of programs and of their gateway."""

from __future__ import annotations

import os
from collections.abc import Iterator

from april.config.recipe import Recipe
from april.config.settings.environment_settings import NEMO_GYM
from april.config.settings.gateway_settings import GatewaySettings

LARGEST_PORT = 65_535


def program_problems(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each setting of programs that is wrong."""
    own, gateway = recipe.environment, recipe.gateway
    if own.score and (not own.is_program or own.reward == "task"):
        yield 'environment.score rewards programs; without one, or with reward = "task", remove it'
    if own.image and not own.command:
        yield "environment.image is a container for environment.command, which is not set; remove it"
    if own.container_engine != "auto" and not own.image:
        yield "environment.container_engine needs environment.image; set that, or remove it"
    if not own.is_program:
        if gateway != GatewaySettings():
            yield "gateway is set, but no program uses it: set environment.command, function or url, or remove it"
        return
    kinds = {"path": own.path, "tools": own.tools, "command": own.command, "function": own.function, "url": own.url}
    given = [name for name, value in kinds.items() if value]
    if len(given) > 1:
        yield f"environment.{given[1]} is set beside environment.{given[0]}: remove one of the two"
    if own.url and not own.url.startswith(("http://", "https://")):
        yield f"environment.url = {own.url!r}: must be an address with http:// or https://"
    if own.params and not (own.url or own.path):
        yield "environment.params: a command and a function have none; remove it"
    if own.is_nemo_gym and not own.path.removeprefix(NEMO_GYM).startswith(("http://", "https://")):
        yield f"environment.path = {own.path!r}: must be nemo-gym: and an address with http:// or https://"
    if own.is_verifiers and own.workers == 0:
        yield "environment.workers = 0: verifiers environments have worker processes; remove it"
    if own.recovery not in ("replay", "restart"):
        yield f'environment.recovery = "{own.recovery}": a program is recovered by "replay" or "restart"'
    if recipe.cluster.environments == "nodes":
        yield 'cluster.environments = "nodes": programs run beside the trainer; remove it'
    if not 0 <= gateway.port <= LARGEST_PORT:
        yield f"gateway.port = {gateway.port}: must be a port, or 0 for any free one"
    if not gateway.models:
        yield "gateway.models: name at least one model"
    rollout = recipe.rollout
    if gateway.sampling == "request" and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        yield (
            'gateway.sampling = "request" cannot be trained with rollout.top_p, top_k or min_p: leave them out, or set '
            'gateway.sampling = "recipe"'
        )
    if gateway.address and not gateway.address.startswith(("http://", "https://")):
        yield f"gateway.address = {gateway.address!r}: must be an address with http:// or https://"
    folder = os.path.dirname(own.command[0]) if own.command and not own.image else ""
    if folder and not os.path.exists(own.command[0]):
        yield f"environment.command: there is no program {own.command[0]!r}"
