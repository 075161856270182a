"""Guess a number: the environment of this example.

The game is that of GEM (`gem-llm`), `game:GuessTheNumber-v0-hard`, where that package is installed, and the same game
written here where it is not: a seed gives the same number in both. What is said is cut down to what a policy of 0.2
million parameters can read: the last word of a turn is the guess, and it hears `higher`, `lower`, or `again` where the
guess was none.

The reward is 1 for the number, else 0. `by_turn` deals it out in the bits that each answer tells: with n numbers left,
log2(n + 1) of them are still to come, and none once the number is said. Their shares add up to 1 for the number, and to
less without it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import log2
from typing import Any, Literal

from april import EnvStep, Turn


class Guess:
    """Guess a number from 1 to `most` in `turns` turns.

    Args:
        package: where the game comes from; `auto` is GEM's where that is installed.
        by_turn: reward each turn with what its answer tells.
    """

    def __init__(
        self,
        most: int = 63,
        turns: int = 6,
        package: Literal["auto", "gem", "own"] = "auto",
        by_turn: bool = False,
    ) -> None:
        self.most, self.turns, self.by_turn = most, turns, by_turn
        self.game: Any = None
        if package == "gem" or (package == "auto" and find_spec("gem") is not None):
            from april.environments.gem import GemEnvironment

            self.game = GemEnvironment("game:GuessTheNumber-v0-hard", min_number=1, max_number=most, max_turns=turns)

    def reset(self, prompt: Mapping[str, Any], seed: int) -> str:
        self.number, self.turn, self.said = 0, 0, set[int]()
        self.low, self.high = 0, self.most + 1
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
        reward = self._told(int(guess), said) if self.by_turn else float(said == "right")
        return EnvStep(said, reward, done=said in ("right", "over"))

    def close(self) -> None:
        pass

    def _told(self, guess: int, said: str) -> float:
        """The share of all bits that this answer tells."""
        before = self.high - self.low
        if said == "higher":
            self.low = max(self.low, guess)
        elif said == "lower":
            self.high = min(self.high, guess)
        left = 1 if said == "right" else self.high - self.low
        return log2(before / left) / log2(self.most + 1)

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
