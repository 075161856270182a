"""A recipe's environment: where its episodes live, and how turns become tokens."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings import EnvironmentSettings
from april.environments.bridge import TemplateError, bridge_of
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.environments.workers import EnvironmentHost, EnvironmentWorkers
from april.rollout.environment import Environment
from april.rollout.episodes import Episodes
from april.rollout.secrets import resolved
from april.rollout.trajectory import Prompt
from april.tasks.answers import text_of
from april.tasks.encoding import Encoder, check_template_arguments
from april.tasks.task import ChatTemplate

log = logging.getLogger(__name__)

MOST = 8
"""Worker processes of a machine, where the recipe does not say."""


class EnvironmentSetup:
    """What a recipe says of its environment, tried once.

    Attributes:
        chat_template: how prompts are encoded, so that turns can be put behind them.
        template_arguments: what the chat template is given beside a prompt.

    Raises:
        ConfigError: the environment cannot be made, or turns cannot be bridged with this tokenizer.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self.recipe = recipe
        self._source = source_of(recipe)
        try:
            stops = recipe.sampling(stop_token_ids).stop_token_ids
            self._bridge = bridge_of(
                tokenizer, stops, recipe.task.chat_template, self._source.tools, recipe.task.template_arguments
            )
        except TemplateError as error:
            raise ConfigError(f"environment: {error}") from None
        except ValueError as error:
            raise ConfigError(f"environment.{error}") from None
        arguments = getattr(self._bridge, "prompt_arguments", None)
        self.template_arguments: Mapping[str, Any] = arguments or {}
        self.chat_template: ChatTemplate = recipe.task.chat_template if arguments is None else "always"

    @contextmanager
    def episodes(self, context_length: int) -> Iterator[Episodes]:
        """The episodes of a run; their processes end with the block."""
        own = self.recipe.environment
        make: Callable[[], Environment] = self._source
        limits = self.recipe.episode_limits()
        if own.workers == 0:
            yield Episodes(make, self._bridge, context_length, limits, row)
        elif self.recipe.cluster.environments == "nodes":
            from april.engines.ray.node_environments import NodeEnvironments

            # A node that cannot import it says so in its own words, as worker processes do.
            with closing(NodeEnvironments(partial(_host, pickle.dumps(make), own))) as nodes:
                yield Episodes(nodes, self._bridge, context_length, limits, row)
        else:
            with _workers(make, own) as processes:
                yield Episodes(processes, self._bridge, context_length, limits, row)


def prompt_encoder(recipe: Recipe, tokenizer: Any, world: EnvironmentSetup | None) -> Encoder:
    """The encoder of a recipe's prompts, so that an environment's turns can follow them.

    Raises:
        ConfigError: the chat template does not know one of the recipe's arguments.
    """
    task = recipe.task
    try:
        check_template_arguments(task.template_arguments, tokenizer)
    except ValueError as error:
        raise ConfigError(f"task.{error}") from None
    if world is not None:
        return Encoder(tokenizer, world.chat_template, world.template_arguments)
    return Encoder(tokenizer, task.chat_template, task.template_arguments, task.continue_assistant)


def source_of(recipe: Recipe) -> EnvironmentSource:
    """What makes the recipe's environments, here and wherever it is unpickled.

    Raises:
        ConfigError: none can be made.
    """
    own = recipe.environment
    try:
        return EnvironmentSource(EnvironmentSpec(own.path, own.tools, resolved(own.params, os.environ), os.getcwd()))
    except ValueError as error:
        raise ConfigError(f"environment.{error}") from None


def _workers(make: Callable[[], Environment] | bytes, own: EnvironmentSettings) -> EnvironmentWorkers:
    """Processes on this machine."""
    workers = own.workers or min(os.cpu_count() or 1, MOST)
    return EnvironmentWorkers(make, workers, -(-own.concurrency // workers), own.env)


def _host(make: bytes, own: EnvironmentSettings) -> EnvironmentHost:
    """On a node: its environments."""
    return EnvironmentHost(_workers(make, own))


def row(prompt: Prompt) -> dict[str, Any]:
    """What an environment's `reset` is told of a problem: its record, flat."""
    problem = prompt.metadata
    return {
        **problem.get("metadata", {}),
        "id": prompt.id,
        "prompt": problem.get("prompt"),
        "answer": text_of(problem.get("answer")),
    }
