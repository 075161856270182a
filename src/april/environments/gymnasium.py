"""Environments of gymnasium, and of whatever keeps its interface: `reset(seed=…)` and a `step` of five answers.

    [environment]
    path = "april.environments.gymnasium:GymnasiumEnvironment"
    params = { id = "FrozenLake-v1", render_mode = "ansi" }

Invariants:
- an episode's randomness follows from its seed, also where a package draws from the process-wide generators;
- a turn without an action is answered by an observation that names the error; the environment does not see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np

from april.environments.randomness import OwnRandom
from april.extras import missing_package
from april.loading import load_object
from april.rollout.episodes.environment import EnvStep, Observation, Turn

SEEDS = 1 << 32
"""Seeds that such packages take."""


class GymnasiumEnvironment:
    """An environment of gymnasium's registry.

    Args:
        id: its name there.
        action: a function of yours, `FILE.py:NAME`, that converts a turn's text to an action; if there is none,
            it raises ValueError with a message to the policy. Unset: a number if actions are discrete, else the text.
        observation: a function that converts an observation to text. Unset: the result of `render` with
            `render_mode = "ansi"`, text as it is, and `str` of anything else.
        params: arguments of the environment.

    Raises:
        ModuleNotFoundError: the package is not installed; the message contains the command that installs it.
    """

    package = "gymnasium"
    """As it is imported."""
    distribution = "gymnasium"
    """As it is installed."""
    draws_from_the_process = False
    """Whether it draws from Python's and NumPy's process-wide generators; one episode works at a time then."""

    def __init__(self, id: str, action: str | None = None, observation: str | None = None, **params: Any) -> None:
        self.environment: Any = self._imported().make(id, **params)
        self._action = load_object("params.action", action) if action else self._usual_action
        self._observation = load_object("params.observation", observation) if observation else self._usual_observation
        self._random: AbstractContextManager[None] = nullcontext()

    def _imported(self) -> Any:
        try:
            return import_module(self.package)
        except ModuleNotFoundError as error:
            # Another name: the package is installed, and one of its own imports is missing.
            if error.name != self.package:
                raise
            absent = ModuleNotFoundError(f"{self.distribution} is not installed", name=self.distribution)
            raise ModuleNotFoundError(missing_package(absent, "this environment")) from None

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        if self.draws_from_the_process:
            self._random = OwnRandom(seed)
        with self._random:
            said, info = self.environment.reset(seed=seed % SEEDS)
            return self._said(said, info)

    def step(self, turn: Turn) -> EnvStep:
        try:
            action = self._action(turn.text)
        except ValueError as error:
            return EnvStep(f"Error: {error}")
        with self._random:
            said, reward, terminated, truncated, info = self.environment.step(action)
            done = bool(terminated or truncated)
            return EnvStep(self._said(said, info), float(reward), done, {"truncated": bool(truncated)})

    def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()

    def _said(self, said: Any, info: Mapping[str, Any]) -> Observation:
        text: Observation = self._observation(said)
        return text

    def _usual_action(self, text: str) -> Any:
        space: Any = getattr(self.environment, "action_space", None)
        if type(space).__name__ != "Discrete":
            return text
        numbers = re.findall(r"-?\d+", text)
        if not numbers or not space.contains(int(numbers[-1])):
            last = int(space.start) + int(space.n) - 1
            raise ValueError(f"say a number from {int(space.start)} to {last}; the last number in a turn counts")
        return int(numbers[-1])

    def _usual_observation(self, said: Any) -> str:
        if getattr(self.environment, "render_mode", None) == "ansi":
            return str(self.environment.render())
        return str(said.tolist() if isinstance(said, np.ndarray) else said)
