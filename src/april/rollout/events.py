"""Events of the rollouts, as immutable values.

`RolloutState.apply` defines the effect of each event; the journal stores events in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.transition import Transition


class Admitted(NamedTuple):
    """A group of `n_samples` was started; `prompts` is the state of the prompt stream after it, if it has one."""

    group_id: int
    prompt: Prompt
    n_samples: int
    sampling: SamplingParams
    seed: int
    prompts: Mapping[str, Any] | None = None


Sampled: TypeAlias = Chunk
"""A policy sampled tokens for a sample, or an engine ended it."""


class Stepped(NamedTuple):
    """An environment answered a turn of a sample, or started its episode (turn -1): it inserted tokens, or ended it.

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
    """Saved state of the environment, as JSON types, if it can save itself."""
    features: Sequence[Feature] = ()
    """Images of the answer."""


class Branched(NamedTuple):
    """A program asked for a turn in a sequence of its own: the first of its episode, or one that branches off."""

    group_id: int
    sample_index: int
    """Index of the sample."""
    episode: int
    parent: int | None
    """Index of the sample whose first `shared` tokens, prompt and response, the prompt begins with."""
    shared: int
    token_ids: Sequence[int]
    """Tokens of the prompt after those."""
    transition: Transition
    """With the program's request."""
    features: Sequence[Feature] = ()
    """Images among `token_ids`."""


class Ended(NamedTuple):
    """A program ended its episode. Sequences without a sampled token are dropped, except the first one."""

    group_id: int
    episode: int
    last: int
    """Index of the sample that the reward belongs to: the one that the program used last."""
    finish: FinishReason
    transition: Transition
    """The end of that sample, with the reward; its position is not used."""


class Restarted(NamedTuple):
    """An episode restarts because its environment cannot be restored. Its tokens are counted and dropped."""

    sample_id: str
    reason: str


class Rewarded(NamedTuple):
    """Episodes of a group were scored: rewards by the episodes' indices."""

    group_id: int
    rewards: Mapping[int, Reward]


class Accepted(NamedTuple):
    """The dynamic filter accepted a complete group."""

    group_id: int


class Rejected(NamedTuple):
    """A group was rejected."""

    group_id: int
    reason: Rejection


class Trained(NamedTuple):
    """A batch was handed to training: the ids of its groups, and its statistics."""

    group_ids: Sequence[int]
    step: RolloutBatch


class Updated(NamedTuple):
    """The engine received the weights of policy `version`."""

    version: int


Event: TypeAlias = (
    Admitted | Sampled | Stepped | Branched | Ended | Restarted | Rewarded | Accepted | Rejected | Trained | Updated
)
