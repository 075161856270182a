"""Environments of OpenEnv in this process, or behind a client of your own; `openenv_server.py` takes a URL.

    [environment]
    path = "april.environments.openenv:OpenEnvEnvironment"
    params = { make = "my_env.py:make", action = "my_env.py:action", observation = "my_env.py:text" }

OpenEnv's environments take and return typed objects; two functions of yours convert a turn's text to an action, and an
observation to text. OpenEnv is not imported here: its environments and its synchronous clients have one interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from april.loading import load_object
from april.rollout.episodes.environment import EnvironmentLost, EnvStep, Observation, Turn


class OpenEnvEnvironment:
    """An environment, or a client's connection to one.

    Args:
        make: user function that returns the environment: `MyEnvironment()`, or `MyEnv(base_url=…).sync()`.
        action: converts a turn's text to an action; raises ValueError with a message to the policy if the text contains
            no action.
        observation: converts an observation to text or messages.
    """

    def __init__(self, make: str, action: str, observation: str) -> None:
        self._action = load_object("params.action", action)
        self._observation = load_object("params.observation", observation)
        self.environment: Any = load_object("params.make", make)()

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        known = inspect.signature(self.environment.reset).parameters
        episode = {"episode_id": prompt["id"]} if "episode_id" in known else {}
        if hasattr(self.environment, "connect"):
            self._called(self.environment.connect)
        begun = self._called(self.environment.reset, seed=seed, **episode)
        said: Observation = self._observation(self._parts(begun)[0])
        return said

    def step(self, turn: Turn) -> EnvStep:
        try:
            action = self._action(turn.text)
        except ValueError as error:
            return EnvStep(f"Error: {error}")
        observation, reward, done = self._parts(self._called(self.environment.step, action))
        return EnvStep(self._observation(observation), float(reward or 0.0), bool(done))

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()

    def _called(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            # By module name, because april itself does not depend on websockets.
            of_the_line = isinstance(error, OSError) or type(error).__module__.startswith("websockets.")
            if of_the_line or "CAPACITY_REACHED" in str(error):
                raise EnvironmentLost(f"the environment's server does not answer: {error}") from error
            raise

    def _parts(self, result: Any) -> tuple[Any, Any, Any]:
        """Observation, reward, done: a client returns a result that holds the observation, an environment itself."""
        return getattr(result, "observation", result), result.reward, result.done
