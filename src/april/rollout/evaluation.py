"""Complete groups for prompts that are not trained on, past everything that is under way, and beside what flies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from april.rollout.engine import Chunk, ChunkError, Engine, EngineError
from april.rollout.episodes import EpisodeError, Episodes
from april.rollout.events import Stepped
from april.rollout.flight import Flight, first_of
from april.rollout.flights import Flights
from april.rollout.retries import Retries
from april.rollout.trajectory import Group, Sample


async def complete(
    engine: Engine,
    groups: Sequence[Group],
    retries: Retries,
    episodes: Episodes | None = None,
    flights: Flights | None = None,
) -> None:
    """Generate until every sample of `groups` has finished; if that fails, nothing of them is left in the engine.
    Other samples that it holds are not touched.

    Args:
        episodes: what answers their turns, for these samples alone; closed in the end.
        flights: those that the engine holds beside, if anything else does.

    Raises:
        EngineError: the engine failed, or a request of it did, more often than `retries` allows.
        EpisodeError: an environment did, more often than its policy allows.
    """
    flights = Flights() if flights is None else flights
    with flights.beside() as flight:
        run = _Run(engine, groups, retries, episodes, flight, flights)
        try:
            await run.complete()
        finally:
            if episodes is not None:
                await episodes.close()
            await retries.stop()
            names = [sample.id for group in groups for sample in group.samples]
            await engine.interrupt(names)
            engine.forget(names)


class _Run:
    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        retries: Retries,
        episodes: Episodes | None,
        flight: Flight,
        flights: Flights,
    ) -> None:
        self.engine = engine
        self.retries = retries
        self.episodes = episodes
        self.unfinished = {sample.id: (sample, group) for group in groups for sample in group.samples}
        self.flight = flight
        self.flights = flights
        self.poll = partial(flights.poll, engine, flight)

    async def complete(self) -> None:
        for sample, group in self.unfinished.values():
            self._go_on(sample, group)
        while self.unfinished:
            waits = [self.episodes.wait] if self.episodes else []
            waits += [self.retries.wait] if self.retries.controls else []
            if self.flight:
                self._absorb(await self.flight.poll(self.poll, self.retries.next(True), waits))
            else:
                await first_of(waits, self.retries.next(False))
            self._hear()
            for sample in self.retries.due(self.engine, self.flights, self.flight):
                self._go_on(*self.unfinished[sample.id])
            for sample, error in self.retries.given_up():
                raise EngineError(f"sample {sample.id} kept failing: {error}")

    def _go_on(self, sample: Sample, group: Group) -> None:
        if self.episodes is not None and sample.awaits_environment:
            self.episodes.begin(sample, group)
        else:
            self.flight.submit(self.engine, [sample], 0.0, [])

    def _absorb(self, chunks: Sequence[Chunk]) -> None:
        begun = self.flight.begun(chunks, 0.0)
        self.retries.received(chunks, begun, self.flight.samples)
        for chunk in chunks:
            if chunk.sample_id not in self.flight.samples:
                raise ChunkError(chunk, "no such sample is in flight")
            sample, group = self.unfinished[chunk.sample_id]
            try:
                sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            except (ValueError, TypeError) as error:
                raise ChunkError(chunk, str(error)) from None
            if sample.finish is not None:
                del self.unfinished[sample.id]
            if chunk.finish is not None:
                self.flight.end([sample.id], 0.0, "finished")
                if sample.finish is None:
                    self._go_on(sample, group)
            elif chunk.error is not None:
                self.flight.end([sample.id], 0.0, "failed")
                self.retries.failed(sample, chunk)

    def _hear(self) -> None:
        for sample, group, event, failures in self.episodes.take() if self.episodes is not None else ():
            if event is None:
                raise EpisodeError(f"environments keep failing; the last one, sample {sample.id}: {failures[-1].error}")
            if isinstance(event, Stepped):
                sample.observe(event.token_ids, event.transition, event.finish, event.state)
            else:
                group.begin_again(sample.index)
            if sample.finish is None:
                self._go_on(sample, group)
            else:
                del self.unfinished[sample.id]
