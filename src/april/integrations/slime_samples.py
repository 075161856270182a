"""slime's sample for each of april's: what its data source gave, april's tokens, and what its hooks and reward models
made of them, which april keeps with the sample's reward.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.utils.types import Sample as SlimeSample

from april.rollout.disk import as_json
from april.rollout.sampling import FinishReason
from april.rollout.trajectory import Group, Prompt, Sample


def sampled(prompt: Prompt, sample: Sample) -> SlimeSample:
    """slime's sample with the tokens that april's has; not their text."""
    theirs = SlimeSample.from_dict(copy.deepcopy(prompt.metadata["slime"][sample.index]))
    theirs.tokens = [*sample.prompt_ids, *sample.response_ids]
    theirs.response_length = sample.length
    theirs.rollout_log_probs = sample.logprobs.tolist()
    theirs.loss_mask = sample.loss_mask.astype(int).tolist()
    theirs.weight_versions = [str(segment.version) for segment in sample.segments]
    stopped = sample.finish is FinishReason.STOP
    theirs.status = SlimeSample.Status.COMPLETED if stopped else SlimeSample.Status.TRUNCATED
    theirs.reward = None
    return theirs


def differs(value: Any, other: Any) -> bool:
    """Whether they are different as JSON; lists are of tokens, and long."""
    return bool(value != other) if isinstance(value, list) else as_json(value) != as_json(other)


def scored(group: Group) -> list[SlimeSample]:
    """slime's samples of a complete group, as its hooks and reward models left them."""
    return [
        SlimeSample.from_dict({**sampled(group.prompt, sample).to_dict(), **sample.reward_info["slime"]})
        for sample in group.samples
    ]
