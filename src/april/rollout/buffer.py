"""The buffer: groups that were admitted, and neither trained on nor rejected yet.

Invariants, checked by `Buffer.check` at the end of every step:
- admitted = buffered + trained + rejected, and no group is counted twice;
- every sampled token is in exactly one sample: sampled = buffered + trained + rejected + tokens of episodes that were
  restarted + tokens that became drafts; the same holds for tokens that environments inserted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample


class Rejection(StrEnum):
    """Reason why a group is not trained on."""

    FILTER = "filter"
    """The dynamic-sampling filter rejected it: it carries no signal."""
    REWARD = "reward"
    """Its reward function failed, and the run is set to leave such groups out."""
    ENGINE = "engine"
    """A request of one of its samples kept failing."""
    ENVIRONMENT = "environment"
    """An environment of one of its samples kept failing."""


@dataclass(slots=True)
class Tally:
    """Counts of groups (or restarted episodes) and tokens with the same outcome."""

    groups: int = 0
    tokens: int = 0
    environment_tokens: int = 0

    def count(self, *groups: Group) -> None:
        tokens = observed = 0
        for group in groups:
            for sample in group.samples:
                tokens += sample.length
                observed += sample.environment_tokens
        self.add(len(groups), tokens - observed, observed)

    def add(self, groups: int, tokens: int, environment_tokens: int) -> None:
        self.groups += groups
        self.tokens += tokens
        self.environment_tokens += environment_tokens


@dataclass(slots=True)
class Buffer:
    """The buffered groups in the order of admission, and the counts of groups that left."""

    groups: dict[int, Group] = field(default_factory=dict)
    admitted: int = 0
    sampled_tokens: int = 0
    environment_tokens: int = 0
    trained: Tally = field(default_factory=Tally)
    rejected: dict[Rejection, Tally] = field(default_factory=lambda: {reason: Tally() for reason in Rejection})
    restarted: Tally = field(default_factory=Tally)
    """Restarted episodes, and the tokens that they had."""
    redrafted: Tally = field(default_factory=Tally)
    """Groups whose responses became drafts as the weights changed."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples of the buffered groups."""
        return chain.from_iterable([group.samples for group in self.groups.values()])

    def find(self, sample_id: str) -> Sample:
        """Return the sample with this id.

        Raises:
            KeyError: it is not in the buffer.
        """
        group_id, _, index = sample_id.rpartition(" ")[2].partition(".")
        try:
            sample = self.groups[int(group_id)].sample(int(index))
        except (ValueError, LookupError):
            raise KeyError(sample_id) from None
        # The id of an evaluation's sample contains the number of a training group, but names another sample.
        if sample.id != sample_id:
            raise KeyError(sample_id)
        return sample

    def group_of(self, sample: Sample) -> Group:
        return self.groups[sample.group_id]

    def admit(self, group: Group) -> None:
        if group.id != self.admitted:
            raise ValueError(f"group {group.id} was admitted out of turn: the next one is {self.admitted}")
        self.groups[group.id] = group
        self.admitted += 1

    def train(self, groups: Iterable[Group]) -> None:
        self.trained.count(*[self.groups.pop(group.id) for group in groups])

    def reject(self, group: Group, reason: Rejection) -> None:
        self.rejected[reason].count(self.groups.pop(group.id))

    def redraft(self) -> None:
        """Turn every buffered response into a draft."""
        for group in self:
            self.redrafted.count(group)
            group.redraft()

    @property
    def tokens(self) -> int:
        """Sampled tokens of the buffered groups."""
        return sum([sample.length - sample.environment_tokens for sample in self.samples])

    @property
    def discarded_tokens(self) -> int:
        """Sampled tokens that are in no buffered, trained or rejected group, and belong to no restarted episode and no
        draft. Always zero."""
        return self._discarded(self.tokens)

    def _discarded(self, buffered: int) -> int:
        return self.sampled_tokens - buffered - sum(tally.tokens for tally in self._left)

    @property
    def _left(self) -> tuple[Tally, ...]:
        return (self.trained, *self.rejected.values(), self.restarted, self.redrafted)

    def check(self, tokens: int | None = None) -> None:
        """Check the invariants.

        Args:
            tokens: `self.tokens`, if the caller has just counted them.
        """
        rejected = sum(tally.groups for tally in self.rejected.values())
        assert self.admitted == len(self) + self.trained.groups + rejected, "a group was lost or counted twice"
        discarded = self._discarded(self.tokens if tokens is None else tokens)
        assert discarded == 0, f"{discarded} sampled tokens are in no sample"
        left = sum(tally.environment_tokens for tally in self._left)
        observed = left + sum([sample.environment_tokens for sample in self.samples])
        assert self.environment_tokens == observed, "tokens of an environment are in no sample"

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [group.to_dict() for group in self],
            "admitted": self.admitted,
            "sampled_tokens": self.sampled_tokens,
            "environment_tokens": self.environment_tokens,
            "trained": astuple(self.trained),
            "rejected": {reason: astuple(tally) for reason, tally in self.rejected.items()},
            "restarted": astuple(self.restarted),
            "redrafted": astuple(self.redrafted),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Buffer:
        groups = [Group.from_dict(saved) for saved in state["groups"]]
        buffer = cls(
            {group.id: group for group in groups},
            state["admitted"],
            state["sampled_tokens"],
            state["environment_tokens"],
            Tally(*state["trained"]),
            {reason: Tally(*state["rejected"].get(reason, ())) for reason in Rejection},
            Tally(*state.get("restarted", ())),
            Tally(*state.get("redrafted", ())),
        )
        buffer.check()
        return buffer
