"""Environments of GEM (the package gem-llm): games, mathematics, code.

    [environment]
    path = "april.environments.gem:GemEnvironment"
    params = { id = "game:GuessTheNumber-v0-hard", max_number = 63, max_turns = 6 }

They are gymnasium's interface with text for actions and observations. They draw from the process-wide generators, in
`reset` and some in `step`: here each episode has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from april.environments.gymnasium import GymnasiumEnvironment
from april.rollout.episodes.environment import Observation


class GemEnvironment(GymnasiumEnvironment):
    """An environment of GEM's registry.

    Args:
        id: its name there.
        suffix: put what GEM's `info` suggests as the end of the policy's next prompt behind each observation.
        params: constructor arguments of the environment.
    """

    package = "gem"
    distribution = "gem-llm"
    draws_from_the_process = True

    def __init__(self, id: str, suffix: bool = True, **params: Any) -> None:
        self._suffix = suffix
        super().__init__(id, **params)

    def _said(self, said: Any, info: Mapping[str, Any]) -> Observation:
        suffix = info.get("suffix") if self._suffix else None
        return f"{said}\n{suffix}" if suffix else str(said)
