"""Settings of programs that play episodes."""

from __future__ import annotations

from typing import Any

import pytest

from april.config.recipe import Recipe
from april.config.settings.environment_settings import PROGRAM_SECONDS, EnvironmentSettings


@pytest.mark.parametrize(
    ("own", "seconds"),
    [
        ({"url": "http://host"}, PROGRAM_SECONDS),
        ({"command": ("python", "agent.py")}, PROGRAM_SECONDS),
        ({"url": "http://host", "episode_deadline": 9.0}, 9.0),
        ({"path": "env.py:Env"}, None),
        ({"path": "env.py:Env", "episode_deadline": 9.0}, 9.0),
    ],
)
def test_a_program_that_hangs_ends_by_itself(own: dict[str, Any], seconds: float | None) -> None:
    recipe = Recipe(environment=EnvironmentSettings(**own))
    assert recipe.episode_limits().deadline == seconds
