"""Rollout steps as a scheduler hands them over, and the recipe they are trained by."""

from __future__ import annotations

import numpy as np

from april import ENVIRONMENT, FinishReason, Group, Prompt, RolloutBatch, SamplingParams, Segment
from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.rollout.batch import Plan

VERSION = 3


def rollout(seed: int, groups: int = 3, size: int = 4, longest: int = 40) -> RolloutBatch:
    """Groups as a scheduler would hand them over at version 3: mixed versions, a truncated sample, an empty turn."""
    rng = np.random.default_rng(seed)
    made = []
    for id in range(groups):
        prompt = Prompt(tuple(rng.integers(4, 100, rng.integers(1, 12)).tolist()), f"prompt {id}")
        group = Group.start(id, prompt, size, SamplingParams(max_tokens=64), seed)
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
