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


@dataclass(kw_only=True)
class EnvironmentSettings:
    """The environment of multi-turn episodes. Without path and tools, a response is a single turn.

    Args:
        path: Environment class or factory: FILE.py:NAME or package.module:NAME.
        tools: Python functions offered as tools, in place of an environment: FILE.py:NAME,NAME,…
        params: Keyword arguments of the environment's constructor.
        max_turns: Maximum number of turns in an episode. max_response_length limits the policy's tokens over all turns;
            context_length limits all tokens.
        reward: Reward of an episode: the sum of the environment's rewards (environment), the task's reward for the
            whole response (task), or the sum of both (sum).
        recovery: Recovery of an environment after a crash or failure: repeat the recorded turns and require identical
            observations (replay), restore the last state() (snapshot), call reset alone (stateless), or restart the
            episode (restart).
        on_env_error: Action when a step fails: report the error to the policy as an observation and continue (observe),
            end the episode with its rewards so far (end), or leave out its group (reject).
        concurrency: Maximum number of environments that execute at the same time.
        workers: Maximum number of worker processes for environments. 0: the run's own process, for fast environments
            that cannot hang. Unset: the number of CPU cores, at most 8.
        reset_timeout: Time limit of a reset in seconds, including the start of a worker process.
        step_timeout: Time limit of a step, in seconds.
        episode_deadline: Time limit of the environment over all turns of an episode, in seconds; unset: no limit.
        max_retries: Replacement environments per turn whose environment was lost, and per failed reset.
        max_restarts: Restarts of an episode before its group is left out.
        env: Environment variables that workers get although their names look like secrets.
    """

    path: str = ""
    tools: str = ""
    params: dict[str, Any] = field(default_factory=dict)
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
        return bool(self.path or self.tools)
