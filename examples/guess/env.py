"""Guess a number: the environment of this example.

The game is GEM's (`gem-llm`) `game:GuessTheNumber-v0-hard` if that package is installed, otherwise the same game
written here: a seed gives the same number in both. Messages are short enough for a policy of 0.2 million parameters:
the last word of a turn is the guess, and the answer is `higher`, `lower`, or `again` if there was no guess.

The reward is 1 for the number, else 0. `by_turn` rewards the questions of training games instead of the luck of their
answers: a turn is worth the expected information of its guess, relative to the best guess, with all remaining numbers
equally likely. So a guess that halves the remaining numbers is worth 1, and a turn without a guess is worth 0.
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
        package: source of the game; `auto` is GEM's if it is installed.
        by_turn: reward each turn by the expected information of its guess.
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
        """Expected information of a guess, relative to the best one: 1 for the middle of the remaining numbers."""
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
    """Mean bits of a guess with the given numbers of candidates below and above it: n numbers are log2(n + 1) bits, of
    which the answer leaves log2(below + 1), log2(above + 1) or none."""
    left = below + above + 1
    return log2(left + 1) - (below * log2(below + 1) + above * log2(above + 1)) / left
