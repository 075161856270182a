"""A real OpenEnv server: python openenv_echo.py KIND PORT SESSIONS"""

from __future__ import annotations

import random
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Say(Action):
    text: str


class Heard(Observation):
    text: str = ""


class Guess(Environment):
    """A number from 1 to 9; each guess is answered by a hint."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = self.count = 0

    def reset(self, seed=None, episode_id=None, hang=0.0, **kwargs):
        time.sleep(hang)
        self.number, self.count = random.Random(seed).randint(1, 9), 0
        return Heard(text=f"Guess in {episode_id}.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.text == "fail":
            raise KeyError("the environment fails")
        self.count += 1
        right = action.text == str(self.number)
        return Heard(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        return State(step_count=self.count)


class Move(Action):
    row: int
    column: int


class Board(Observation):
    cells: list[int] = Field(default_factory=list)
    note: str = ""


class Grid(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Board(cells=[0, 0], note="empty")

    def step(self, action, timeout_s=None, **kwargs):
        return Board(cells=[action.row, action.column], note="moved", reward=1.0, done=True)

    @property
    def state(self):
        return State(step_count=0)


if __name__ == "__main__":
    kinds = {"guess": (Guess, Say, Heard), "grid": (Grid, Move, Board)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=int(sys.argv[3]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
