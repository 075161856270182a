"""An engine in which samples end at their stop strings, whatever engine generates them.

Stop strings are found here, where tokens arrive, and not by the parameters of inference servers: servers cut text where
april needs the drawn tokens, and some take no text at all. The first chunk with a stop string ends its sample, and the
engine is interrupted for that sample.

Invariants:
- the engine protocol (`rollout/engine.py`) holds: no token is lost, except those that an engine drew behind a stop
  string before it was interrupted. They were never part of the response, and no token of the response depends on them;
- nothing runs for a sample once the chunk that ends it is returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from april.rollout.engine import Chunk, Engine
from april.rollout.sampling import FinishReason
from april.rollout.stop_strings import Decode, StopScanner, tokens_needed
from april.rollout.trajectory.sample import Sample
from april.rollout.wrapped_engine import WrappedEngine


class StoppingEngine(WrappedEngine):
    """See above.

    Args:
        engine: generates the samples.
        decode: text of token ids.
    """

    def __init__(self, engine: Engine, decode: Decode) -> None:
        super().__init__(engine)
        self._decode = decode
        self._scanners: dict[str, tuple[StopScanner, Sequence[int]]] = {}
        """Samples in flight that have stop strings, with their stop tokens."""
        self._ending: set[str] = set()
        """Samples that have ended at a stop string, and may still run in the engine."""
        self._ready: list[Chunk] = []
        """Chunks that a cancelled `poll` has not returned."""
        self._interrupting = asyncio.Lock()
        self.behind_stops = 0
        """Tokens that the engine drew behind stop strings."""

    def submit(self, sample: Sample) -> None:
        self.engine.submit(sample)  # first, because it may refuse the sample
        if stops := sample.stop_strings:
            start = sample.turn_span(len(sample.transitions) - 1)[0] if sample.transitions else 0
            known = sample.tokens_between(max(start, sample.length - tokens_needed(stops)), sample.length)
            self._scanners[sample.id] = StopScanner(self._decode, stops, known), sample.sampling.stop_token_ids

    async def poll(self) -> list[Chunk]:
        if not self._ready and not self._ending:
            chunks = await self.engine.poll()
            self._ready += self._scan(chunks)
        if self._ending:
            await self._interrupt(set())
        ready, self._ready = self._ready, []
        return ready

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        chunks = await self._interrupt(named)
        ready, self._ready = self._ready, []
        if named is not None:
            self._ready = [chunk for chunk in ready if chunk.sample_id not in named]
            ready = [chunk for chunk in ready if chunk.sample_id in named]
        return [*ready, *chunks]

    async def _interrupt(self, named: set[str] | None) -> list[Chunk]:
        """Stop the named samples, and those that have ended here; return the tokens of the named ones."""
        async with self._interrupting:
            stopping = None if named is None else named | self._ending
            chunks = await self.engine.interrupt(stopping)
            kept = self._scan(chunks)
            if stopping is None:
                self._ending.clear()
                self._scanners.clear()
            else:
                self._ending -= stopping
                for id in stopping:
                    self._scanners.pop(id, None)
            return kept

    def _scan(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks up to the stop strings of their samples."""
        if not self._scanners and not self._ending:  # no sample has any
            return chunks
        kept = []
        for chunk in chunks:
            if chunk.sample_id in self._ending:
                self.behind_stops += len(chunk.token_ids)
            else:
                kept.append(self._up_to_stop(chunk))
        return kept

    def _up_to_stop(self, chunk: Chunk) -> Chunk:
        id, token_ids = chunk.sample_id, chunk.token_ids
        if id not in self._scanners:
            return chunk
        scanner, stop_token_ids = self._scanners[id]
        text_ids = token_ids
        if chunk.finish is FinishReason.STOP and len(token_ids) and token_ids[-1] in stop_token_ids:
            text_ids = token_ids[:-1]
        count = scanner.scan(text_ids)
        ended = chunk.finish is not None or chunk.error is not None
        if ended or count is not None:
            del self._scanners[id]
        if count is None:
            return chunk
        if not ended:
            self._ending.add(id)
        self.behind_stops += len(token_ids) - count
        return Chunk(id, token_ids[:count], chunk.logprobs[:count], chunk.version, FinishReason.STOP)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        named = None if sample_ids is None else set(sample_ids)
        self._ready = [] if named is None else [chunk for chunk in self._ready if chunk.sample_id not in named]
        self.engine.forget(named)
