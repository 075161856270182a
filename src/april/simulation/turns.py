"""Episodes in virtual time: lengths of turns, and the time and length of the environment's answers.

Invariants:
- the end of a turn and the time of its answer depend only on the run's seed, the sample and the turn, not on the
  schedule;
- an environment is done when the response has the workload's length: turns only divide a response.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

from april.rollout.episodes.environment import EnvStep, Observation, Said, TokenIds, Turn
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

MOST_TURNS = 1 << 20
"""More turns than a simulated episode can have, as the response budget ends it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of a workload's responses, if they are episodes.

    Args:
        tokens: mean number of policy tokens of a turn, which is distributed exponentially.
        observation_tokens: tokens of each answer.
        seconds: mean time of an answer.
        sigma: standard deviation of the logarithm of that time (0: constant; 1.5: a heavy tail).
    """

    tokens: float
    observation_tokens: int = 0
    seconds: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        others = (self.observation_tokens, self.seconds, self.sigma)
        if not (1 <= self.tokens < math.inf and all(0 <= value < math.inf for value in others)):
            raise ValueError(f"{self}: a turn needs at least one token, and no value may be negative")

    @classmethod
    def seen(cls, samples: Sequence[Sample]) -> Turns | None:
        """Return turns like the turns of `samples`; None if no sample had an environment."""
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
        """Return the number of response tokens at which the policy's current turn ends."""
        before = sample.transitions[sample.turns]
        # Inverse of the exponential distribution function.
        drawn = -self.tokens * math.log(uniform(sample.seed, sample.turns))
        return before.start + before.tokens + max(round(drawn), 1)

    def latency(self, seed: int, turn: int) -> float:
        """Return the seconds that the answer to `turn` takes."""
        if not self.sigma:
            return self.seconds
        # Lognormal by Box and Muller. The term sigma^2 / 2 makes `seconds` the mean, not the median.
        first, second = uniform(seed, 2 * turn), uniform(seed, 2 * turn + 1)
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        return self.seconds * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def episodes(self, ended: Collection[str], context_length: int) -> EnvironmentEpisodes:
        """Return episodes with unlimited concurrency and no time limits.

        Args:
            ended: ids of samples whose last turn has ended.
        """
        limits = EpisodeLimits(concurrency=1 << 20, step_timeout=None, reset_timeout=None, deadline=None)
        return EnvironmentEpisodes(lambda: SimulatedEnvironment(self, ended), Silent(), context_length, limits)


class SimulatedEnvironment:
    """Answers with tokens that mean nothing, after the time that `turns` specifies.

    Args:
        turns: time and length of answers.
        ended: ids of samples whose last turn has ended.
    """

    def __init__(self, turns: Turns, ended: Collection[str]) -> None:
        self.turns = turns
        self.ended = ended
        self.seed = 0
        self.answer = TokenIds((0,) * turns.observation_tokens)

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        self.seed = seed
        return TokenIds()

    async def step(self, turn: Turn) -> EnvStep:
        # Samples of a group share a seed, but the times of their answers are independent.
        await asyncio.sleep(self.turns.latency(self.seed ^ hash_of(turn.sample_id), turn.index))
        return EnvStep(self.answer, done=turn.sample_id in self.ended)

    async def close(self) -> None:
        pass


class Silent:
    """A bridge for observations that are token ids already."""

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        return None

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said("")

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        return None


def hash_of(sample_id: str) -> int:
    """Return a number for a sample that is the same in every process."""
    group, _, index = sample_id.partition(".")
    return int(group) << 16 | int(index)


def uniform(seed: int, place: int) -> float:
    """Return a number in (0, 1] that depends on both; `place` is at least 0 (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) + 1) / (1 << 64)
