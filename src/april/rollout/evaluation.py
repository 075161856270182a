"""Complete groups for prompts that are not trained on, past everything that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from april.rollout.engine import ChunkError, Engine, EngineError
from april.rollout.flight import Flight
from april.rollout.retries import Retries
from april.rollout.trajectory import Group


async def complete(engine: Engine, groups: Sequence[Group], retries: Retries) -> None:
    """Generate until every sample of `groups` has finished; if that fails, nothing of them is left in the engine.

    Raises:
        EngineError: the engine failed, or a request of it did, more often than `retries` allows.
    """
    unfinished = {sample.id: sample for group in groups for sample in group.samples}
    try:
        for sample in unfinished.values():
            engine.submit(sample)
        while unfinished:
            if len(retries) == len(unfinished):
                await asyncio.sleep(retries.next or 0)
            for chunk in await Flight().poll(engine, retries.next):
                if chunk.sample_id not in unfinished:
                    raise ChunkError(chunk, "no such sample is in flight")
                sample = unfinished[chunk.sample_id]
                try:
                    sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
                except (ValueError, TypeError) as error:
                    raise ChunkError(chunk, str(error)) from None
                if chunk.token_ids:
                    retries.went_on(sample)
                if chunk.finish is not None:
                    del unfinished[sample.id]
                elif chunk.error is not None and not chunk.recovered and not retries.failed(sample):
                    raise EngineError(f"sample {sample.id} kept failing: {chunk.error}")
            for sample in retries.due():
                engine.submit(sample)
    finally:
        await engine.interrupt()
        engine.forget(sample.id for group in groups for sample in group.samples)
