"""Guess a number: the environment of this example.

The game is that of GEM (`gem-llm`), `game:GuessTheNumber-v0-hard`, where that package is installed, and the same game
written here where it is not: a seed gives the same number in both. What is said is cut down to what a policy of 0.2
million parameters can read: the last word of a turn is the guess, and it hears `higher`, `lower`, or `again` where the
guess was none.

The reward is 1 for the number, else 0. `by_turn` judges the questions of games that are trained on, instead of the luck
with their answers: a turn is worth what its guess can be expected to tell, relative to the best one, every number that
is left being as likely. So a guess that halves what is left is worth 1, and a turn without a guess nothing.
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
        by_turn: judge each turn by what its guess can be expected to tell.
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
        self.judged = self.by_turn and "/eval/" not in prompt.get("id", "")
        if self.game is not None:
            self.game.reset(prompt, seed)
        else:
            self.number = random.Random(seed).randint(1, self.most)
        return ""

    def step(self, turn: Turn) -> EnvStep:
        guess = turn.text.rpartition(" ")[2]
        if not guess.isdecimal() or int(guess) == 0:
            return EnvStep(reward=0.0, done=True)
        number, share = int(guess), self._share(int(guess))
        said = self._gem(turn, guess) if self.game is not None else self._own(number)
        if said == "higher":
            self.low = max(self.low, number)
        elif said == "lower":
            self.high = min(self.high, number)
        return EnvStep(said, share if self.judged else float(said == "right"), said in ("right", "over"))

    def close(self) -> None:
        pass

    def _share(self, guess: int) -> float:
        """What a guess can be expected to tell, relative to the best one: 1 for the middle of what is left."""
        left = self.high - self.low - 1
        below, above = guess - self.low - 1, self.high - guess - 1
        if min(below, above) < 0:
            return 0.0
        return expected_bits(below, above) / expected_bits((left - 1) // 2, left // 2)

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


def expected_bits(below: int, above: int) -> float:
    """That a guess tells on average, with so many numbers left below and above it: n numbers are log2(n + 1) bits, of
    which the answer leaves log2(below + 1), log2(above + 1) or none."""
    left = below + above + 1
    return log2(left + 1) - (below * log2(below + 1) + above * log2(above + 1)) / left
