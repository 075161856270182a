"""Several flights in one engine: the rollouts, and an evaluation beside them.

Invariants:
- one at a time waits for the engine, for all of them, and nobody waits on for what another was handed;
- a chunk goes to the flight that holds its sample; one that no flight holds goes to the first, which complains of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from april.rollout.engine import Chunk, Engine
from april.rollout.flight import Flight


class Flights:
    """The flights whose samples one engine holds.

    Attributes:
        rollouts: the first of them, which is always there.
    """

    def __init__(self) -> None:
        self.rollouts = Flight()
        self._beside: list[Flight] = []
        self._turn = asyncio.Lock()

    def __len__(self) -> int:
        """Samples in flight."""
        return len(self.rollouts) + sum(map(len, self._beside))

    @contextmanager
    def beside(self) -> Iterator[Flight]:
        """One more flight; nothing of it may be left in the engine at the end."""
        flight = Flight()
        self._beside.append(flight)
        try:
            yield flight
        finally:
            self._beside.remove(flight)

    async def poll(self, engine: Engine, flight: Flight) -> list[Chunk]:
        """What the engine sampled next for `flight`; nothing if that was for others."""
        async with self._turn:
            return flight.late() or self._deal(await engine.poll(), flight)

    def _deal(self, chunks: list[Chunk], to: Flight) -> list[Chunk]:
        """Those of `chunks` that are for `to`; the others are kept for their own."""
        if not self._beside:
            return chunks
        dealt: dict[Flight, list[Chunk]] = {}
        for chunk in chunks:
            owner = next((one for one in self._beside if chunk.sample_id in one.samples), self.rollouts)
            dealt.setdefault(owner, []).append(chunk)
        own = dealt.pop(to, [])
        for owner, others in dealt.items():
            owner.keep(others)
        return own
