"""Conversion of april's samples to slime's.

A slime sample has three parts: the fields from slime's data source (kept in the prompt's metadata), april's tokens, and
the changes made by slime's hooks and reward models (kept with the sample's reward).
"""

from __future__ import annotations

import copy
from typing import Any

from slime.utils.types import Sample as SlimeSample

from april.disk import as_json
from april.integrations.generating_code import result_of
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

SAMPLES = "slime"
"""Key in the result of a generate function: the samples that it returned."""
DIVIDED = "several"
"""Key in the result of a generate function: whether it returned a list."""
START_ROLLOUT_IDS = "start_rollout_ids"
"""Key in a prompt's metadata: for each sample that its first rollout left unfinished, the id of that rollout."""


def sampled(prompt: Prompt, sample: Sample) -> SlimeSample:
    """Return slime's sample with the tokens of april's, without their text."""
    slime_sample = SlimeSample.from_dict(copy.deepcopy(prompt.metadata["slime"][sample.index]))
    slime_sample.tokens = [*sample.prompt_ids, *sample.response_ids]
    slime_sample.response_length = sample.length
    slime_sample.rollout_log_probs = sample.logprobs.tolist()
    slime_sample.loss_mask = sample.loss_mask.astype(int).tolist()
    slime_sample.weight_versions = [str(segment.version) for segment in sample.segments]
    stopped = sample.finish is FinishReason.STOP
    slime_sample.status = SlimeSample.Status.COMPLETED if stopped else SlimeSample.Status.TRUNCATED
    slime_sample.reward = None
    return _marked(prompt, sample, slime_sample)


def mark_unfinished(group: Group, rollout_id: int) -> None:
    """Record `rollout_id` for samples that a rollout leaves unfinished for the first time, as slime's buffer does."""
    started = group.prompt.metadata.setdefault(START_ROLLOUT_IDS, {})  # type: ignore[attr-defined]
    for sample in group.samples:
        if sample.length:
            started.setdefault(str(sample.episode), rollout_id)


def _marked(prompt: Prompt, sample: Sample, slime_sample: SlimeSample) -> SlimeSample:
    if (rollout_id := prompt.metadata.get(START_ROLLOUT_IDS, {}).get(str(sample.episode))) is not None:
        slime_sample.metadata["start_rollout_id"] = rollout_id
    return slime_sample


def differs(value: Any, other: Any) -> bool:
    """Return whether two values differ as JSON. Lists hold tokens and are long: they are compared directly."""
    return bool(value != other) if isinstance(value, list) else as_json(value) != as_json(other)


def scored(group: Group) -> list[Any]:
    """Return slime's samples of a complete group, with the changes made by its hooks and reward models. A sample that a
    generate function divided is a list."""
    return [_scored(group.prompt, sample) for sample in group.outcomes]


def _scored(prompt: Prompt, sample: Sample) -> Any:
    kept = sample.reward_info["slime"]
    if sample.transitions:
        samples = [_marked(prompt, sample, SlimeSample.from_dict(one)) for one in kept]
        return samples if result_of(sample)[DIVIDED] else samples[0]
    return _marked(prompt, sample, SlimeSample.from_dict({**sampled(prompt, sample).to_dict(), **kept}))


def returned(sample: Sample) -> list[SlimeSample]:
    """Return the samples that a generate function returned for a finished sample."""
    return [SlimeSample.from_dict(one) for one in copy.deepcopy(result_of(sample)[SAMPLES])]
