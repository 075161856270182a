"""Guess a number: the environment of this example.

The game is that of GEM (`gem-llm`), `game:GuessTheNumber-v0-hard`, where that package is installed, and the same game
written here where it is not: a seed gives the same number in both. What is said is cut down to what a policy of 0.2
million parameters can read: the last word of a turn is the guess, and it hears `higher`, `lower`, or `again` where the
guess was none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

from april import EnvStep, Turn


class Guess:
    """Guess a number from 1 to `most` in `turns` turns. The reward is 1 for the number, else 0.

    Args:
        package: where the game comes from; `auto` is GEM's where that is installed.
    """

    def __init__(self, most: int = 63, turns: int = 6, package: Literal["auto", "gem", "own"] = "auto") -> None:
        self.most, self.turns = most, turns
        self.game: Any = None
        if package == "gem" or (package == "auto" and find_spec("gem") is not None):
            from april.environments.gem import GemEnvironment

            self.game = GemEnvironment("game:GuessTheNumber-v0-hard", min_number=1, max_number=most, max_turns=turns)

    def reset(self, prompt: Mapping[str, Any], seed: int) -> str:
        self.number, self.turn, self.said = 0, 0, set[int]()
        if self.game is not None:
            self.game.reset(prompt, seed)
        else:
            self.number = random.Random(seed).randint(1, self.most)
        return ""

    def step(self, turn: Turn) -> EnvStep:
        guess = turn.text.rpartition(" ")[2]
        if not guess.isdecimal() or int(guess) == 0:
            return EnvStep(done=True, info={"right": 0})
        said = self._gem(turn, guess) if self.game is not None else self._own(int(guess))
        return EnvStep(said, float(said == "right"), done=said in ("right", "over"))

    def close(self) -> None:
        pass

    def _own(self, guess: int) -> str:
        self.turn += 1
        if guess == self.number:
            return "right"
        if self.turn == self.turns:
            return "over"
        if guess in self.said or guess > self.most:
            return "again"
        self.said.add(guess)
        return "lower" if guess > self.number else "higher"

    def _gem(self, turn: Turn, guess: str) -> str:
        step = self.game.step(replace(turn, text=f"\\boxed{{{guess}}}"))
        if "Congratulations" in step.observation:
            return "right"
        if step.done:
            return "over"
        if " is lower than " in step.observation:
            return "lower"
        return "higher" if " is higher than " in step.observation else "again"
