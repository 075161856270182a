"""Setup of a run's programs: the gateway, what plays the episodes, and the conversion of messages."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.extras import missing_package
from april.images.kept import KeptImages
from april.images.store import ImageStore, NoImages
from april.loading import load_object
from april.rendering.choice import program_renderer
from april.rendering.conversation import TemplateError
from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.secrets import resolved
from april.tasks.task import ChatTemplate
from april.training.environment_setup import row, worker_counts

SECRET = "gateway.secret"
"""File of the run's directory with the secret that the keys of episodes are signed with."""


class ProgramSetup:
    """Programs of a run; constructing it checks the settings.

    Args:
        recipe: the run's recipe.
        tokenizer: the policy's tokenizer.
        stop_token_ids: ids that end a turn.
        images: images of the policy.

    Attributes:
        chat_template: use of the chat template for prompts. A program's first request replaces the prompt.
        template_arguments: arguments of the chat template.

    Raises:
        ConfigError: a package is missing, the function cannot be loaded, or conversations cannot be extended exactly
            with this tokenizer.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Any, stop_token_ids: tuple[int, ...], images: ImageStore | NoImages
    ) -> None:
        self._recipe = recipe
        self._images = images
        self.chat_template: ChatTemplate = recipe.task.chat_template
        self.template_arguments: Mapping[str, Any] = recipe.task.template_arguments
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("environment: programs send messages, but the tokenizer has no chat template")
        try:
            self._renderer = program_renderer(tokenizer, stop_token_ids, recipe.task.template_arguments)
            from april.gateway.agent import CommandProgram, FunctionProgram, Program, RemoteProgram
        except TemplateError as error:
            raise ConfigError(f"environment: {error}") from None
        except ModuleNotFoundError as error:
            raise ConfigError(missing_package(error, "environment: the gateway")) from None
        own = recipe.environment
        self._program: Program
        try:
            self._score = load_object("environment.score", own.score, Path.cwd()) if own.score else None
            if own.command:
                engine = "" if own.container_engine == "auto" else own.container_engine
                self._program = CommandProgram(own.command, own.env, own.image, engine)
            elif own.is_verifiers:
                from april.gateway.verifiers_program import VerifiersProgram

                params = resolved(own.params, os.environ)
                self._program = VerifiersProgram(own.path, params, own.max_turns, *worker_counts(own), own.env)
            elif own.is_nemo_gym:
                from april.gateway.nemo_gym import NeMoGymProgram

                headers = resolved(own.params, os.environ)
                self._program = NeMoGymProgram(own.path, headers, own.reset_timeout, own.step_timeout, own.max_turns)
            elif own.function:
                self._program = FunctionProgram(load_object("environment.function", own.function, Path.cwd()))
            else:
                self._program = RemoteProgram(own.url, resolved(own.params, os.environ))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @asynccontextmanager
    async def episodes(self, context_length: int, directory: Path, kept: KeptImages) -> AsyncIterator[AgentEpisodes]:
        """Open the gateway and the episodes of a run.

        Args:
            directory: the run's directory.
            kept: keeps the images of requests.

        Raises:
            ConfigError: the gateway cannot listen.
        """
        from april.gateway.agent import ProgramAgents
        from april.gateway.server import Gateway, GatewayParams

        own, recipe = self._recipe.environment, self._recipe
        settings = recipe.gateway
        params = GatewayParams(
            settings.host,
            settings.port,
            settings.address or None,
            settings.models,
            settings.sampling == "request",
            settings.keep_alive_seconds,
            settings.max_request_megabytes * 2**20,
        )
        secret = run_secret(directory)
        gateway = Gateway(None, self._renderer, self._renderer, params, secret, kept)
        agents = ProgramAgents(
            self._program, gateway, own.reward != "task", self._score, score_timeout=own.step_timeout
        )
        episodes = AgentEpisodes(
            agents, self._renderer, context_length, recipe.episode_limits(), row, own.keep_thinking, self._images
        )
        gateway.policy = episodes
        agents.conversations = lambda key: [kept.with_paths(branch) for branch in episodes.conversations(key)]
        try:
            await gateway.start()
        except OSError as error:
            raise ConfigError(str(error)) from None
        try:
            await self._program.begin(hashlib.sha256(b"run" + secret).hexdigest()[:16])
            yield episodes
        finally:
            await gateway.stop()
            await self._program.close()


def run_secret(directory: Path) -> bytes:
    """Return the secret of a run, which only its user can read; a resumed run has the same."""
    path = directory / SECRET
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return bytes.fromhex(path.read_text())
