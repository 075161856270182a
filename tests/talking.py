"""A policy and an environment whose messages follow from seeds and from the conversation, so that a whole episode is
known beforehand for any interruption."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from april import Chunk, EnvStep, FinishReason, Prompt, Sample, SamplingParams, TokenIds, Turn
from april.rollout.episodes.environment import Said
from tests.scripted_engine import ScriptedEngine, logprob

STOP = 0
"""Ends a turn."""


def token(seed: int, context: Sequence[int]) -> int:
    """Return the policy's token after `context`; about every fifth token ends the turn."""
    return random.Random(f"{seed} {len(context)} {sum(context)}").randrange(100) % 5 and len(context) % 90 + 1


class TalkingEngine(ScriptedEngine):
    """Ends turns with `STOP`; every token follows from the seed and the tokens before it."""

    def submit(self, sample: Sample) -> None:
        assert sample.id not in self.flight, "submitted twice"
        assert not sample.awaits_environment, "submitted while it awaits its environment"
        assert sample.finish is None, "submitted after it had finished"
        self.submissions.append(sample.id)
        self.flight[sample.id] = (list(sample.response_ids), sample.seed, sample.room(self.capacity.context_length))

    def serve(self, id: str, count: int) -> Chunk:
        context, seed, room = self.flight[id]
        drawn: list[int] = []
        while len(drawn) < min(count, room) and STOP not in drawn:
            drawn.append(token(seed, context))
            context.append(drawn[-1])
        self.flight[id] = (context, seed, room - len(drawn))
        finish = FinishReason.STOP if STOP in drawn else FinishReason.LENGTH if len(drawn) == room else None
        if finish is not None:
            del self.flight[id]
        return Chunk(id, drawn, [logprob(t, self.version) for t in drawn], self.version, finish)


class Numbers:
    """A bridge for observations that are token ids, and for errors, which are put as one token."""

    def begin(self, prompt: Prompt, observation: Any) -> Sequence[int] | None:
        return ()

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said(" ".join(map(str, token_ids)))

    def extend(self, sample: Sample, observation: Any) -> Sequence[int] | None:
        return (999,) if observation.startswith("Error") else None


def said_by_environment(seed: int, words: int) -> tuple[TokenIds, float, bool]:
    """What `Room` answers when it has heard `words` tokens in all."""
    rng = random.Random(f"{seed} {words}")
    return TokenIds(rng.randrange(100, 200) for _ in range(rng.randrange(4))), rng.randrange(8) / 8, rng.random() < 0.15


class Room:
    """Answers and rewards by seed and by the length of the conversation, after a random number of turns of the event
    loop.

    It counts the calls of each turn, and lists the live environments in `alive`.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.seed = self.words = 0
        self.calls = 0
        world.alive.add(self)

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        await self.world.pause("reset")
        self.seed, self.words = seed, 0
        return said_by_environment(seed, 0)[0]

    async def step(self, turn: Turn) -> EnvStep:
        await self.world.pause(turn.key)
        self.world.steps[turn.key] += 1
        assert not self.calls, "two steps of an environment at a time"
        self.calls += 1
        await asyncio.sleep(0)
        self.calls -= 1
        self.words += len(turn.token_ids)
        observation, reward, done = said_by_environment(self.seed, self.words)
        return EnvStep(observation, reward, done, {"words": self.words})

    def state(self) -> list[int]:
        return [self.seed, self.words]

    def restore(self, state: list[int]) -> None:
        self.seed, self.words = state

    async def close(self) -> None:
        self.world.alive.discard(self)


class World:
    """The shared state of a test's environments: their durations and counters.

    Args:
        trouble: called with the name of an environment's next action; may raise.
    """

    def __init__(self, seed: int = 0, slowness: int = 3, trouble: Callable[[str], Any] | None = None) -> None:
        self.rng = random.Random(seed)
        self.slowness = slowness
        self.trouble = trouble
        self.alive: set[Room] = set()
        self.steps: Counter[str] = Counter()

    def __call__(self) -> Room:
        return Room(self)

    async def pause(self, what: str) -> None:
        for _ in range(self.rng.randrange(self.slowness + 1)):
            await asyncio.sleep(0)
        if self.trouble is not None and asyncio.iscoroutine(waiting := self.trouble(what)):
            await waiting


def episode(
    sample: Sample, environment_seed: int, context_length: int = 1 << 20
) -> tuple[list[int], FinishReason, list[float]]:
    """The whole response of an episode that nothing disturbs, how it ends, and its rewards by turn."""
    sampling: SamplingParams = sample.sampling
    words, rewards = 0, list[float]()
    response = list(said_by_environment(environment_seed, 0)[0])
    budget = sampling.max_tokens
    while True:
        turn: list[int] = []
        while STOP not in turn:
            if not budget or len(sample.prompt_ids) + len(response) == context_length:
                return response, FinishReason.CONTEXT if budget else FinishReason.LENGTH, rewards
            turn.append(token(sample.seed, response))
            response.append(turn[-1])
            budget -= 1
        words += len(turn)
        observation, reward, done = said_by_environment(environment_seed, words)
        rewards.append(reward)
        if done:
            return response, FinishReason.DONE, rewards
        if len(rewards) == sampling.max_turns:
            return response, FinishReason.TURNS, rewards
        if not budget:
            return response, FinishReason.LENGTH, rewards
        if len(sample.prompt_ids) + len(response) + len(observation) >= context_length:
            return response, FinishReason.CONTEXT, rewards
        response += observation
