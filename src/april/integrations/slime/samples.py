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

BEGUN = "start_rollout_ids"
"""In a prompt's metadata: the rollout that began each sample, for those that it did not finish."""


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
    return _marked(prompt, sample, theirs)


def mark_begun(group: Group, rollout_id: int) -> None:
    """Note the rollout that leaves its samples unfinished for the first time, which slime documents for its buffer."""
    begun = group.prompt.metadata.setdefault(BEGUN, {})  # type: ignore[attr-defined]
    for sample in group.samples:
        if sample.length:
            begun.setdefault(str(sample.index), rollout_id)


def _marked(prompt: Prompt, sample: Sample, theirs: SlimeSample) -> SlimeSample:
    if (rollout_id := prompt.metadata.get(BEGUN, {}).get(str(sample.index))) is not None:
        theirs.metadata["start_rollout_id"] = rollout_id
    return theirs


def differs(value: Any, other: Any) -> bool:
    """Whether they are different as JSON; lists are of tokens, and long."""
    return bool(value != other) if isinstance(value, list) else as_json(value) != as_json(other)


def scored(group: Group) -> list[SlimeSample]:
    """slime's samples of a complete group, as its hooks and reward models left them."""
    return [
        _marked(
            group.prompt,
            sample,
            SlimeSample.from_dict({**sampled(group.prompt, sample).to_dict(), **sample.reward_info["slime"]}),
        )
        for sample in group.samples
    ]
