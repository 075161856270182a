"""Interrupts of an engine's samples by name, a few at a time, while the remaining samples continue."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from april import Chunk, Engine, Sample


class Moment(NamedTuple):
    """After this many polls the chosen samples are stopped, during a poll or between two; then the samples that were
    stopped before them are resumed."""

    polls: int
    chosen: frozenset[int]
    beside: bool


def moments(samples: int) -> st.SearchStrategy[list[Moment]]:
    chosen = st.frozensets(st.integers(0, samples - 1))
    return st.lists(st.builds(Moment, st.integers(0, 4), chosen, st.booleans()), max_size=8)


async def finish(engine: Engine, samples: Sequence[Sample], schedule: Sequence[Moment]) -> None:
    """Generate every sample to its end through the interrupts of `schedule`. Fails if a chunk comes for a sample that
    has been stopped; requests that fail are made again."""
    by_id = {sample.id: sample for sample in samples}
    in_flight: set[str] = set()

    def submit(sample: Sample) -> None:
        if sample.finish is None and sample.id not in in_flight:
            engine.submit(sample)
            in_flight.add(sample.id)

    def absorb(chunks: Sequence[Chunk], stopped: Container[str] = ()) -> None:
        failed = []
        for chunk in chunks:
            assert chunk.sample_id in in_flight
            sample = by_id[chunk.sample_id]
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            if chunk.finish is not None or chunk.error is not None:
                in_flight.remove(sample.id)
                failed.append(sample)
        for sample in failed:
            if sample.id not in stopped:
                submit(sample)

    async def stop(names: set[str], beside: bool) -> None:
        poll = asyncio.create_task(engine.poll()) if beside else None
        await asyncio.sleep(0)
        interrupted = await engine.interrupt([*names, "no such sample"])
        assert {chunk.sample_id for chunk in interrupted} <= names
        if poll is not None and poll.done():  # the returned tokens were sampled before
            absorb(poll.result(), names)
        absorb(interrupted, names)
        in_flight.difference_update(names)
        if poll is not None and not poll.done():
            absorb(await poll)

    for sample in samples:
        submit(sample)
    stopped: list[Sample] = []
    for moment in schedule:
        for _ in range(moment.polls):
            absorb(await engine.poll())
        chosen = [samples[i] for i in moment.chosen]
        await stop({sample.id for sample in chosen}, moment.beside)
        assert engine.running <= len(in_flight)
        for sample in stopped:
            if sample not in chosen:
                submit(sample)
        stopped = chosen
    for sample in stopped:
        submit(sample)
    while in_flight:
        absorb(await engine.poll())
    assert await engine.poll() == []
