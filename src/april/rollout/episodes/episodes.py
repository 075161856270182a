"""Protocol of episodes: what acts between the turns of the policy.

Invariants:
- a sample that awaits its environment or its program is not in the engine: it holds no slot, and neither generation nor
  an interrupt waits for it;
- an answer has no effect before its event is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from april.rollout.batch import Failure
from april.rollout.buffer import Buffer
from april.rollout.events import Branched, Ended, Restarted, Stepped
from april.rollout.stop_strings import Decode
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """Return the record that an environment or a program gets, unless the caller makes its own."""
    return {"id": prompt.id, **prompt.metadata}


class EpisodeError(Exception):
    """Too many environments or programs fail for a step to be completed."""


class Answer(NamedTuple):
    """What an environment or a program has done: the event of it."""

    sample: Sample
    """The sample that was answered; of a program, the first one of its episode."""
    group: Group
    event: Stepped | Branched | Ended | Restarted | None
    """None: the group is rejected, for the last failure."""
    failures: Sequence[Failure]


class Episodes(Protocol):
    """Open episodes. `len` counts those in which an environment or a program is at work."""

    def __len__(self) -> int: ...

    @property
    def live(self) -> int:
        """Number of open environments or programs."""
        ...

    @property
    def decode(self) -> Decode | None:
        """Text of token ids, for stop strings that programs request; None: nothing requests any."""
        ...

    def apart(self) -> Episodes:
        """Return episodes of the same kind for other samples, such as an evaluation's."""
        ...

    def connect(self, buffer: Callable[[], Buffer]) -> None:
        """Give access to the buffer with the groups of these episodes."""
        ...

    def begin(self, sample: Sample, group: Group, durable: Callable[[], Any] | None = None) -> None:
        """Let the environment or program of a sample act. If the policy has ended a turn, it gets that turn, unless it
        has it already. After a resume this also starts the program of a sample in the middle of a turn.

        Args:
            durable: awaited before it gets the turn, so that the turn is on disk before it acts.
        """
        ...

    def take(self) -> list[Answer]:
        """Return the answers since the last call."""
        ...

    async def wait(self) -> None:
        """Wait until an answer has arrived that was not taken."""
        ...

    def drop(self, samples: Iterable[Sample]) -> None:
        """Discard the environments or programs of samples that have ended, or whose group is left out."""
        ...

    async def close(self) -> None:
        """Stop all environments or programs. Turns without an answer are answered after a restart."""
        ...
