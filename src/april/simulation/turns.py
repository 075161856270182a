"""Episodes in virtual time: how long turns are, what environments answer, and how long that takes.

Invariants:
- where a turn ends and how long its answer takes follows from the run's seed, the sample and the turn; no schedule
  changes it;
- an environment is done when the response is as long as the workload says: turns cut a response up, and nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

from april.rollout.environment import EnvStep, Observation, Said, TokenIds, Turn
from april.rollout.episodes import Episodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory import Prompt, Sample

MOST_TURNS = 1 << 20
"""No simulated episode has as many: the response budget ends it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What a workload's responses are made of, if they are episodes.

    Args:
        tokens: policy tokens of a turn, on average; their number falls off exponentially.
        observation_tokens: of each answer.
        seconds: that an answer takes, on average.
        sigma: standard deviation of the logarithm of that time (0: it is always the same; 1.5: a heavy tail).
    """

    tokens: float
    observation_tokens: int = 0
    seconds: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        others = (self.observation_tokens, self.seconds, self.sigma)
        if not (1 <= self.tokens < math.inf and all(0 <= value < math.inf for value in others)):
            raise ValueError(f"{self}: a turn needs a token at least, and nothing of it is below zero")

    @classmethod
    def seen(cls, samples: Sequence[Sample]) -> Turns | None:
        """As those of `samples` were; None if none of them had an environment."""
        answers = [answer.seconds for sample in samples for answer in sample.transitions[1:]]
        turns = sum(sample.turns for sample in samples if sample.transitions)
        if not turns:
            return None
        known = [math.log(seconds) for seconds in answers if seconds > 0]
        return cls(
            tokens=max(sum(sample.policy_tokens for sample in samples) / turns, 1.0),
            observation_tokens=round(sum(sample.environment_tokens for sample in samples) / turns),
            seconds=sum(answer.seconds for sample in samples for answer in sample.transitions) / turns,
            sigma=pstdev(known) if known else 0.0,
        )

    def end(self, sample: Sample) -> int:
        """Response tokens at which the turn that the policy speaks is over."""
        before = sample.transitions[sample.turns]
        drawn = -self.tokens * math.log(uniform(sample.seed, sample.turns))
        return before.start + before.tokens + max(round(drawn), 1)

    def latency(self, seed: int, turn: int) -> float:
        """Seconds that the answer to `turn` takes."""
        if not self.sigma:
            return self.seconds
        first, second = uniform(seed, 2 * turn), uniform(seed, 2 * turn + 1)
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        return self.seconds * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def episodes(self, over: Collection[str], context_length: int) -> Episodes:
        """Environments without number or trouble.

        Args:
            over: samples that have said their last turn.
        """
        limits = EpisodeLimits(concurrency=1 << 20, step_timeout=None, reset_timeout=None, deadline=None)
        return Episodes(lambda: SimulatedEnvironment(self, over), Silent(), context_length, limits)


class SimulatedEnvironment:
    """Answers late, and with nothing in particular.

    Args:
        turns: how late, and with how many tokens.
        over: samples that have said their last turn.
    """

    def __init__(self, turns: Turns, over: Collection[str]) -> None:
        self.turns = turns
        self.over = over
        self.seed = 0
        self.answer = TokenIds((0,) * turns.observation_tokens)

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        self.seed = seed
        return TokenIds()

    async def step(self, turn: Turn) -> EnvStep:
        # Samples of a group share a seed; their answers do not take equally long.
        await asyncio.sleep(self.turns.latency(self.seed ^ hash_of(turn.sample_id), turn.index))
        return EnvStep(self.answer, done=turn.sample_id in self.over)

    async def close(self) -> None:
        pass


class Silent:
    """A bridge for those who have nothing to say but token ids."""

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        return None

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said("")

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        return None


def hash_of(sample_id: str) -> int:
    """The same number for a sample in every process."""
    group, _, index = sample_id.partition(".")
    return int(group) << 16 | int(index)


def uniform(seed: int, place: int) -> float:
    """A number in (0, 1] that follows from both, `place` being 0 or more (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) + 1) / (1 << 64)
