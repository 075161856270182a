"""Settings of the environment of multi-turn episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from april.config.ranges import (
    NotNegative,
    Positive,
    ProcessesOrNone,
    Seconds,
)

VERIFIERS = "verifiers:"
"""Beginning of `path` for an environment of the package verifiers."""
NEMO_GYM = "nemo-gym:"
"""Beginning of `path` for a resources server of NeMo Gym."""
PROGRAM_SECONDS = 7200.0
"""Default time limit of a program."""


@dataclass(kw_only=True)
class EnvironmentSettings:
    """The environment of multi-turn episodes. Without path, tools, command, function and url, a response is a single
    turn.

    Args:
        path: Environment class or factory: FILE.py:NAME or package.module:NAME; verifiers:NAME or verifiers:FILE.py for
            an environment of the package verifiers; nemo-gym:URL for a resources server of NeMo Gym; openenv:URL for a
            server of OpenEnv.
        tools: Python functions offered as tools, in place of an environment: FILE.py:NAME,NAME,…
        command: Program that plays an episode through the gateway, as a list of words; python is april's interpreter.
        image: Container image in which command runs, if it is set.
        container_engine: Container engine for image; auto is the first one of this machine that is usable.
        function: Async Python function that plays an episode through the gateway: FILE.py:NAME or package.module:NAME.
        url: Address of a service elsewhere that plays episodes through the gateway.
        params: Keyword arguments of the environment's constructor; the settings of a verifiers environment; headers of
            the requests to a URL.
        score: Function that rewards an episode of a program and sees all of it: FILE.py:NAME or package.module:NAME.
        keep_thinking: Continue a turn with the thinking that the policy drew, although the program's next request
            leaves it out. Otherwise such a request starts a sequence of its own.
        parallel_turns: Turns of one episode that a program may have drawn at the same time; more requests wait.
        max_turns: Maximum number of turns in an episode. max_response_length limits the policy's tokens over all turns;
            context_length limits all tokens.
        reward: Reward of an episode: the sum of the environment's rewards (environment), the task's reward for the
            whole response (task), or the sum of both (sum).
        recovery: Recovery of an environment after a crash or failure: repeat the recorded turns and require identical
            observations (replay), restore the last state() (snapshot), call reset alone (stateless), or restart the
            episode (restart).
        on_env_error: Action when a step fails: report the error to the policy as an observation and continue (observe),
            end the episode with its rewards so far (end), or leave out its group (reject). A program that fails ends
            its episode with 0 unless this is reject; an episode whose reward could not be obtained is always left out.
        concurrency: Maximum number of environments that execute at the same time.
        workers: Maximum number of worker processes for environments. 0: the run's own process, for fast environments
            that cannot hang. Unset: the number of CPU cores, at most 8.
        reset_timeout: Time limit of a reset in seconds, including the start of a worker process.
        step_timeout: Time limit of a step, or of a call of score, in seconds.
        episode_deadline: Time limit of the environment or program over all turns of an episode, in seconds, without its
            waits for the policy. Unset: 7200 for a program, no limit for an environment.
        max_retries: Replacement environments per turn whose environment was lost, and per failed reset.
        max_restarts: Restarts of an episode before its group is left out.
        env: Environment variables that workers and programs get although their names look like secrets.
    """

    path: str = ""
    tools: str = ""
    command: tuple[str, ...] = ()
    image: str = ""
    container_engine: Literal["auto", "docker", "podman", "apptainer", "singularity"] = "auto"
    function: str = ""
    url: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    score: str = ""
    keep_thinking: bool = False
    parallel_turns: Positive[int] = 8
    max_turns: Positive[int] = 8
    reward: Literal["environment", "task", "sum"] = "environment"
    recovery: Literal["replay", "snapshot", "stateless", "restart"] = "replay"
    on_env_error: Literal["observe", "end", "reject"] = "observe"
    concurrency: Positive[int] = 64
    workers: ProcessesOrNone | None = None
    reset_timeout: Seconds | None = 120.0
    step_timeout: Seconds | None = 60.0
    episode_deadline: Seconds | None = None
    max_retries: NotNegative[int] = 3
    max_restarts: NotNegative[int] = 3
    env: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        return bool(self.path or self.tools) or self.is_program

    @property
    def is_program(self) -> bool:
        """Whether a program plays the episodes through the gateway."""
        return bool(self.command or self.function or self.url or self.is_verifiers or self.is_nemo_gym)

    @property
    def is_verifiers(self) -> bool:
        """Whether the environment is one of the package verifiers, whose harnesses play through the gateway."""
        return self.path.startswith(VERIFIERS)

    @property
    def is_nemo_gym(self) -> bool:
        """Whether the environment is a resources server of NeMo Gym, which april plays through the gateway."""
        return self.path.startswith(NEMO_GYM)

    @property
    def task_kind(self) -> str | None:
        """Kind of task that the environment requires, if any."""
        return "verifiers" if self.is_verifiers else "nemo_gym" if self.is_nemo_gym else None
