"""Rollout steps as a scheduler hands them over, and the recipe they are trained by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april import ENVIRONMENT, FinishReason, Group, Prompt, RolloutBatch, Sample, SamplingParams, Segment
from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.rollout.batch import Plan
from april.rollout.trajectory.transition import Origin, Transition

VERSION = 3


def rollout(
    seed: int,
    groups: int = 3,
    size: int = 4,
    longest: int = 40,
    sampling: SamplingParams | None = None,
    prompts: Sequence[Prompt] = (),
) -> RolloutBatch:
    """Groups as a scheduler would hand them over at version 3: mixed versions, a truncated sample, an empty turn."""
    rng = np.random.default_rng(seed)
    sampling = sampling or SamplingParams(max_tokens=64)
    made = []
    for id in range(groups):
        prompt = Prompt(tuple(rng.integers(4, 100, rng.integers(1, 12)).tolist()), f"prompt {id}")
        group = Group.start(id, prompts[id] if prompts else prompt, size, sampling, seed)
        for sample in group.samples:
            for version in range(int(rng.integers(0, VERSION + 1)), VERSION + 1):
                n = int(rng.integers(1, longest // 4))
                logprobs = rng.uniform(-5, -0.1, n).tolist()
                sample.segments.append(Segment(version, rng.integers(4, 100, n).tolist(), logprobs))
                sample.length += n
                if rng.random() < 0.3:  # a turn of an environment, which no policy sampled
                    sample.segments.append(Segment(ENVIRONMENT, rng.integers(4, 100, 3).tolist(), [0.0] * 3))
                    sample.length += 3
            sample.finish = FinishReason.STOP if rng.random() < 0.8 else FinishReason.LENGTH
            sample.reward = float(rng.integers(0, 3))
        made.append(group)
    return RolloutBatch(VERSION, Plan(len(made)), made)


def recipe(**algorithm: object) -> Recipe:
    made = Recipe(algorithm=AlgorithmSettings(**{"kl_coef": 0.0, **algorithm}))  # type: ignore[arg-type]
    made.rollout.max_response_length = 64
    made.training.learning_rate = 1e-3
    return made


def branched(seed: int, groups: int = 3, size: int = 3) -> RolloutBatch:
    """Groups of a program's episodes, each of one to four sequences, whose turns have temperatures of their own."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(4, 100, rng.integers(1, most)).tolist())

    def asked(start: int, tokens: int, number: int) -> Transition:
        chosen = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7}][rng.integers(4)]
        return Transition(start, tokens, number=number, request={"messages": [], **chosen})

    def speak(sample: Sample) -> None:
        drawn = ids(12)
        sample.extend(drawn, rng.uniform(-5, -0.1, len(drawn)).tolist(), VERSION, FinishReason.STOP)

    made = []
    for id in range(groups):
        sampling = SamplingParams(max_tokens=64, max_turns=9)
        group = Group.start(id, Prompt(ids(9), f"prompt {id}"), size, sampling, seed)
        for episode in range(size):
            first, number = group.samples[episode], 1
            group.branch(episode, episode, Origin(), ids(9), asked(0, 0, 0))
            speak(first)
            if rng.random() < 0.6:
                observed = ids(5)
                first.observe(observed, asked(first.length, len(observed), number))
                speak(first)
                number += 1
            for _ in range(rng.integers(0, 4)):
                shared = int(rng.integers(0, len(first.prompt_ids) + first.length + 1))
                group.branch(group.next_index, episode, Origin(episode, shared), ids(5), asked(0, 0, number))
                speak(group.samples[-1])
                number += 1
            reward = float(rng.integers(0, 3))
            for sample in group.episode(episode):
                done = sample is first
                sample.observe((), Transition(sample.length, 0, reward * done, done), FinishReason.DONE)
                sample.reward = reward
        made.append(group)
    return RolloutBatch(VERSION, Plan(len(made)), made)
