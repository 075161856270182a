"""Places of a program's turns in the samples of its episode, and their tokens.

Invariants:
- tokens come from the samples alone; the copies here only grow;
- copies are kept of few samples: an episode whose client leaves out thinking begins a sequence with every turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from april.rollout.episodes.conversation_tree import Node
from april.rollout.episodes.turns import TurnEnd, TurnReply
from april.rollout.trajectory.features import Feature, alike
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample

KEPT = 4
"""Samples whose tokens are kept, and that a new prompt is compared with."""
LEAST_SHARED = 32
"""Tokens from which on a beginning is shared."""


class TurnPlaces:
    """The turns of one episode by name.

    Args:
        group: the group with the samples.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._places: dict[str, tuple[int, int]] = {}
        self._last_turns: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        """Prompt and response of the samples that were used last, up to the last turn that was read."""

    def add(self, name: str, index: int, turn: int) -> None:
        """Add the latest turn of the sample with this index."""
        self._places[name] = (index, turn)
        self._last_turns[index] = turn

    def of(self, name: str) -> tuple[int, int]:
        """Return the index of the sample of a turn, and the turn's number in it."""
        return self._places[name]

    def last_turn(self, index: int) -> int | None:
        """Return the number of a sample's latest turn; None if it has none."""
        return self._last_turns.get(index)

    def tokens(self, name: str) -> tuple[list[int], list[int]]:
        """Return all tokens before a turn, and its own."""
        sample, start, end = self._span(name)
        tokens, prompt = self._tokens_of(sample), len(sample.prompt_ids)
        return tokens[: prompt + start], tokens[prompt + start : prompt + end]

    def longest_shared(self, prompt: Sequence[int], features: Sequence[Feature] = ()) -> tuple[int | None, int]:
        """Return the recent sample that has most of the first tokens of a prompt, images included, and their number.

        Args:
            features: images of the prompt; none is shared in part.
        """
        best, parent = LEAST_SHARED - 1, None
        recent = set(list(self._last_turns)[-KEPT:])
        # A sample whose beginning is not applied yet is absent, or has another prompt.
        for sample in self._group.samples:
            if sample.index in recent and sample.origin is not None:
                shared = common_prefix(self._tokens_of(sample), prompt)
                if features or sample.features:
                    shared = alike(sample.features, features, shared)
                    shared = min([f.offset for f in features if f.offset < shared < f.end], default=shared)
                if shared > best:
                    best, parent = shared, sample.index
        return parent, best if parent is not None else 0

    def reply(self, node: Node, stop_token_ids: Collection[int]) -> TurnReply:
        """Return a turn that the policy has ended as a reply."""
        assert node.message is not None, "the policy has not ended the turn"
        before, turn_ids = self.tokens(node.id)
        sample, start, end = self._span(node.id)
        ended = node.stop is not None or (bool(turn_ids) and turn_ids[-1] in stop_token_ids)
        logprobs, versions = sample.logprobs_between(start, end), sample.versions_between(start, end)
        how: TurnEnd = "stop" if ended else "length"
        routes = None if sample.routes is None else sample.routes.frozen()
        return TurnReply(node.id, node.message, before, turn_ids, logprobs, how, versions, node.stop, routes)

    def _span(self, name: str) -> tuple[Sample, int, int]:
        index, turn = self._places[name]
        sample = self._group.sample(index)
        return sample, *sample.turn_span(turn)

    def _tokens_of(self, sample: Sample) -> list[int]:
        """Return prompt and response of a sample; kept, because a long conversation would be copied at each turn."""
        tokens = self._tokens.pop(sample.index, None)
        if tokens is None:
            tokens = list(sample.prompt_ids)
            while len(self._tokens) >= KEPT:
                del self._tokens[next(iter(self._tokens))]
        self._tokens[sample.index] = tokens
        tokens += sample.tokens_between(len(tokens) - len(sample.prompt_ids), sample.length)
        return tokens


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with alike; comparisons of slices make it fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
