"""What can happen to the rollouts, as values that never change.

`RolloutState.apply` says what each one does; the journal keeps them in the order in which they happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory import Prompt, Reward, Transition


class Admitted(NamedTuple):
    """A group of `n_samples` was begun; `prompts` is the state of the prompt stream behind it, if it has one."""

    group_id: int
    prompt: Prompt
    n_samples: int
    sampling: SamplingParams
    seed: int
    prompts: Mapping[str, Any] | None = None


Sampled: TypeAlias = Chunk
"""A policy sampled tokens for a sample, or an engine ended it."""


class Stepped(NamedTuple):
    """An environment answered a turn of a sample, or began its episode (turn -1): it put tokens into it, or ended it.

    There is exactly one for each turn of an attempt, in their order.
    """

    sample_id: str
    turn: int
    action: str
    """Fingerprint of the turn's tokens."""
    token_ids: Sequence[int]
    transition: Transition
    finish: FinishReason | None = None
    state: Any = None
    """What the environment saved, if it saves itself: JSON types."""


class Restarted(NamedTuple):
    """An episode begins again: its environment cannot be brought to where it was. Its tokens are counted and gone."""

    sample_id: str
    reason: str


class Rewarded(NamedTuple):
    """Samples of a group were scored: reward by index."""

    group_id: int
    rewards: Mapping[int, Reward]


class Accepted(NamedTuple):
    """The filter has let a complete group pass."""

    group_id: int


class Rejected(NamedTuple):
    """A group was turned away."""

    group_id: int
    reason: Rejection


class Trained(NamedTuple):
    """A step was handed to training: the ids of its groups, and its account."""

    group_ids: Sequence[int]
    step: RolloutBatch


class Updated(NamedTuple):
    """The engine went over to the weights of policy `version`."""

    version: int


Event: TypeAlias = Admitted | Sampled | Stepped | Restarted | Rewarded | Accepted | Rejected | Trained | Updated
