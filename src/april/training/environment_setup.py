"""Setup of a run's environments: their processes, and the encoding of turns as tokens."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol

from april.config.error import ConfigError
from april.config.settings.environment_settings import EnvironmentSettings
from april.environments.bridge import bridge_of
from april.environments.source import EnvironmentSource, EnvironmentSpec
from april.environments.workers import EnvironmentHost, EnvironmentWorkers
from april.images.kept import KeptImages
from april.images.store import ImageStore, NoImages
from april.rendering.conversation import TemplateError
from april.rollout.episodes.environment import Environment
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.features import PromptImages
from april.rollout.trajectory.prompt import Prompt
from april.secrets import resolved
from april.tasks.answers import text_of
from april.tasks.encoding import Encoder, check_template_arguments
from april.tasks.task import ChatTemplate, TaskSpec

log = logging.getLogger(__name__)

MOST = 8
"""Maximum of the default number of worker processes per machine."""


class TurnEncoding(Protocol):
    """What decides about the encoding of prompts: see `EnvironmentSetup`."""

    chat_template: ChatTemplate
    template_arguments: Mapping[str, Any]


class EnvironmentSetup:
    """Environment of a run and the encoding of its turns; constructing it makes one environment to check the settings.

    Args:
        settings: the recipe's section `environment`.
        task: the recipe's section `task`, for its chat template.
        limits: time limits and retries of episodes.
        tokenizer: the policy's tokenizer.
        stop_token_ids: ids that end a turn.
        images: images of the policy.
        stops: stop strings of the recipe.
        on_nodes: run environments on the nodes of a cluster.

    Attributes:
        chat_template: use of the chat template for prompts, such that turns can be appended.
        template_arguments: arguments of the chat template.

    Raises:
        ConfigError: the environment cannot be made, or turns cannot be bridged with this tokenizer.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        task: TaskSpec,
        limits: EpisodeLimits,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        images: ImageStore | NoImages,
        stops: tuple[str, ...] = (),
        on_nodes: bool = False,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._on_nodes = on_nodes
        self._images = images
        self._source = environment_source(settings)
        try:
            self._bridge = bridge_of(
                tokenizer, stop_token_ids, task.chat_template, self._source.tools, task.template_arguments, stops
            )
        except TemplateError as error:
            raise ConfigError(f"environment: {error}") from None
        except ValueError as error:
            raise ConfigError(f"environment.{error}") from None
        arguments = getattr(self._bridge, "prompt_arguments", None)
        self.template_arguments: Mapping[str, Any] = arguments or {}
        self.chat_template: ChatTemplate = task.chat_template if arguments is None else "always"

    @contextmanager
    def episodes(self, context_length: int, kept: KeptImages) -> Iterator[EnvironmentEpisodes]:
        """Open the episodes of a run; their worker processes end with the block.

        Args:
            kept: keeps the images of observations.
        """
        own, make = self._settings, self._source

        def opened(make: Callable[[], Environment]) -> EnvironmentEpisodes:
            settings = self._bridge, context_length, self._limits, row
            return EnvironmentEpisodes(make, *settings, images=self._images, receive=kept.received)

        if own.workers == 0:
            yield opened(make)
        elif self._on_nodes:
            from april.engines.ray.node_environments import NodeEnvironments

            # Pickled here: a node that cannot import the environment reports that itself, as worker processes do.
            with closing(NodeEnvironments(partial(_host, pickle.dumps(make), own))) as nodes:
                yield opened(nodes)
        else:
            with _workers(make, own) as processes:
                yield opened(processes)


def prompt_encoder(task: TaskSpec, tokenizer: Any, environment: TurnEncoding | None, images: PromptImages) -> Encoder:
    """Return the encoder of prompts; with an environment, turns can be appended to them.

    Raises:
        ConfigError: the chat template does not know one of the recipe's arguments.
    """
    try:
        check_template_arguments(task.template_arguments, tokenizer)
    except ValueError as error:
        raise ConfigError(f"task.{error}") from None
    if environment is not None:
        return Encoder(tokenizer, environment.chat_template, environment.template_arguments, images=images)
    return Encoder(tokenizer, task.chat_template, task.template_arguments, task.continue_assistant, images)


def environment_source(own: EnvironmentSettings) -> EnvironmentSource:
    """Return the picklable factory of the recipe's environments.

    Raises:
        ConfigError: no environment can be made.
    """
    try:
        return EnvironmentSource(EnvironmentSpec(own.path, own.tools, resolved(own.params, os.environ), os.getcwd()))
    except ValueError as error:
        raise ConfigError(f"environment.{error}") from None


def _workers(make: Callable[[], Environment] | bytes, own: EnvironmentSettings) -> EnvironmentWorkers:
    """Start worker processes on this machine."""
    return EnvironmentWorkers(make, *worker_counts(own), own.env)


def worker_counts(own: EnvironmentSettings) -> tuple[int, int]:
    """Return the number of worker processes of a machine, and of environments that each executes at the same time."""
    workers = own.workers or min(os.cpu_count() or 1, MOST)
    return workers, -(-own.concurrency // workers)


def _host(make: bytes, own: EnvironmentSettings) -> EnvironmentHost:
    """Start worker processes on a node; called there."""
    return EnvironmentHost(_workers(make, own))


def row(prompt: Prompt) -> dict[str, Any]:
    """Return the argument of an environment's `reset`: the problem's record, flattened."""
    problem = prompt.metadata
    return {
        **problem.get("metadata", {}),
        "id": prompt.id,
        "prompt": problem.get("prompt"),
        "answer": text_of(problem.get("answer")),
    }
