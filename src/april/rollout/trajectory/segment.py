"""A run of response tokens from one source: a policy version or an environment.

Invariant: every policy token keeps its behaviour log-probability and its policy version.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

ENVIRONMENT = -1
"""Version of tokens that no policy sampled: tool output, the next turn of a conversation."""


@dataclass(slots=True)
class Segment:
    """A run of tokens from one source.

    `version` is the policy version that sampled them, or ENVIRONMENT. `logprobs` has one entry per token: the
    behaviour log-probability in nats for policy tokens, 0 for environment tokens. Tokens that the engine returns in
    arrays are stored in arrays: 12 bytes each instead of 68 for objects in lists.
    """

    version: int
    token_ids: MutableSequence[int] = field(default_factory=list)
    logprobs: MutableSequence[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, version: int, token_ids: Sequence[int], logprobs: Sequence[float], packed: bool) -> Segment:
        """A segment with these tokens, in arrays if `packed`, else in lists."""
        if packed:
            return cls(version, array("i", token_ids), array("d", logprobs))
        return cls(version, list(token_ids), list(logprobs))

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens of this source."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
