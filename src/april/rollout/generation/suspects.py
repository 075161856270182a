"""Find the sample that takes the engine down, by submitting the samples that were in flight in halves.

Invariants:
- a suspect is a sample that was in flight when the engine went down and has not been acquitted since;
- suspects are submitted one set at a time, and the set before is acquitted first: each of its samples has brought a
  token, and the engine has lived twice as long with the set as it last lived before it went down;
- if suspects were in flight when the engine goes down again, one of them is the cause, and all other samples are free;
- the engine going down is charged to a sample only if that sample was the only suspect in flight.

So an outage charges nothing to any sample, and among n samples the one that takes the engine down is found after
log2(n) deaths. The order of the sets follows from the order of the failures alone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from april.rollout.trajectory.sample import Sample


class Failed(Protocol):
    """A failed request of the sample `id`, and the time at which it failed."""

    @property
    def id(self) -> str: ...

    @property
    def at(self) -> float: ...


F = TypeVar("F", bound=Failed)

RELATED = 60.0
"""Seconds after which the next death of the engine is taken to have another cause."""


class Suspects(Generic[F]):
    """Failed requests of samples that may take the engine down.

    `len` counts the requests that are held back, and `in` tests whether a sample has one of them.
    """

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}
        """Times that the engine went down with a sample in flight, since the sample was acquitted."""
        self._alone: dict[str, int] = {}
        """Times among these that a sample was the only suspect in flight."""
        self._sets: list[list[F]] = []
        """Requests held back; the last set is submitted next."""
        self._brought: set[str] = set()
        """Suspects that have brought a token since the engine went down."""
        self._resumed = -math.inf
        """Time at which generation resumed after the engine went down."""
        self._submitted = -math.inf
        """Time at which the latest set was submitted, or generation resumed."""
        self._lived = 0.0
        """Seconds between the latest two deaths that the engine generated; 0 if that is too long to be related."""

    def __len__(self) -> int:
        return sum(map(len, self._sets))

    def __contains__(self, sample_id: object) -> bool:
        return any(one.id == sample_id for requests in self._sets for one in requests)

    def suspected(self, sample_id: str) -> bool:
        """Return whether a sample was in flight when the engine went down, and has not been acquitted since."""
        return sample_id in self._deaths

    def charges(self, sample_id: str) -> int:
        """Return how often the engine went down with this sample as the only suspect, since it was acquitted."""
        return self._alone.get(sample_id, 0)

    @property
    def next(self) -> float | None:
        """When the latest set may be acquitted; None if no set waits for that."""
        return self._acquitted_at if self._sets else None

    @property
    def _acquitted_at(self) -> float:
        return self._submitted + 2 * self._lived

    def engine_died(self, failed: Sequence[F], now: float) -> tuple[list[F], F | None]:
        """Record that the engine went down with these requests in flight, and works again.

        Returns:
            The requests that may be submitted at once, and the one to which the death is charged, if there is one. That
            one is the next set, alone.
        """
        died = min(one.at for one in failed)
        # At the time of death, not now: suspects that had lived long enough before it did not cause it.
        self._acquit(died)
        lived = died - self._resumed
        self._lived = lived if lived <= RELATED else 0.0
        self._resumed = self._submitted = now
        again = [one for one in failed if one.id in self._deaths]
        for one in failed:
            self._deaths[one.id] = self._deaths.get(one.id, 0) + 1
        self._brought.clear()
        if len(again) == 1:
            self._sets.append(list(again))
            self._alone[again[0].id] = self.charges(again[0].id) + 1
            return [one for one in failed if one is not again[0]], again[0]
        suspects = again or failed
        if len(suspects) < 2:
            return list(failed), None
        half = (len(suspects) + 1) // 2
        # `next_set` takes the last set first. These halves come before earlier sets: one of them holds the cause.
        self._sets += [list(suspects[half:]), list(suspects[:half])]
        named = {one.id for one in suspects}
        return [one for one in failed if one.id not in named], None

    def next_set(self, undecided: Container[str], now: float) -> list[F]:
        """Return the set to submit now; empty while the set before is not acquitted.

        Args:
            undecided: the samples that are in flight, or whose failure has not been judged.
        """
        self._acquit(now)
        # Two sets at once would leave open which of them took the engine down.
        if not self._sets or any(id in undecided for id in self._deaths):
            return []
        self._submitted = now
        return self._sets.pop()

    def _acquit(self, now: float) -> None:
        """Acquit the suspects that have brought a token, once the engine has lived for long enough."""
        if now >= self._acquitted_at:
            for id in self._brought:
                self._deaths.pop(id, None)
                self._alone.pop(id, None)
            self._brought.clear()

    def received_tokens(self, samples: Iterable[Sample]) -> None:
        """Record that samples have brought a token."""
        if self._deaths:
            self._brought.update(self._deaths.keys() & {sample.id for sample in samples})

    def request_failed(self, sample_id: str) -> None:
        """Record that the request of a sample failed: the sample is not acquitted by the tokens before."""
        self._brought.discard(sample_id)

    def forget(self, sample_ids: Container[str]) -> None:
        """Forget samples that never resume."""
        self._deaths = {id: deaths for id, deaths in self._deaths.items() if id not in sample_ids}
        self._alone = {id: deaths for id, deaths in self._alone.items() if id not in sample_ids}
        kept = ([one for one in requests if one.id not in sample_ids] for requests in self._sets)
        self._sets = [requests for requests in kept if requests]
