"""Environments of skyrl-gym: a conversation in, messages, a reward and `done` out.

    [environment]
    path = "april.environments.skyrl:SkyRLEnvironment"
    params = { id = "gsm8k_multi_turn" }

A problem's record becomes the environment's `extras`, where SkyRL's data sets have them: `reward_spec.ground_truth` is
the problem's answer unless its record has another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from april.extras import missing_package

try:
    import skyrl_gym
except ModuleNotFoundError as error:
    if error.name != "skyrl_gym":
        raise
    raise ModuleNotFoundError(missing_package(error, "this environment")) from None

from april.rollout.episodes.environment import EnvStep, Message, Observation, ObservationError, Turn


class SkyRLEnvironment:
    """An environment of skyrl-gym's registry.

    Args:
        id: name in the registry.
        env_config: its section of SkyRL's configuration.
        extras: added to the problem's record.
    """

    def __init__(self, id: str, env_config: Mapping[str, Any] | None = None, **extras: Any) -> None:
        known = skyrl_gym.envs.registration.registry
        if id not in known:
            raise ValueError(f"skyrl-gym has no environment {id!r}; it has {', '.join(known)}")
        self.id, self.env_config, self.extras = id, dict(env_config or {}), extras
        self.environment: Any = None

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        extras = {"reward_spec": {"ground_truth": prompt.get("answer")}, "extra_info": {}, **self.extras}
        extras |= {name: value for name, value in prompt.items() if name not in ("id", "prompt", "answer")}
        self.environment = skyrl_gym.make(self.id, env_config=self.env_config, extras=extras)
        asked = prompt["prompt"]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        begun, _ = self.environment.init(asked)
        # The prompt is tokenized already, so `init` can only add messages behind it.
        if list(begun[: len(asked)]) != asked:
            raise ObservationError(f"{self.id} rewrites its prompt: put the text it wants into the problem's prompt")
        more: list[Message] = list(begun[len(asked) :])
        return more

    def step(self, turn: Turn) -> EnvStep:
        answer = self.environment.step(turn.text)
        done = bool(answer["done"])
        return EnvStep([] if done else answer["observations"], float(answer["reward"]), done)

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()
