"""An engine in which samples end at their stop strings, whatever engine generates them.

Stop strings are found here, where tokens arrive, and not by the parameters of inference servers: servers cut text where
april needs the drawn tokens, and some take no text at all. The first chunk with a stop string ends its sample, and the
engine is interrupted for that sample.

Invariants:
- the engine protocol (`rollout/engine.py`) holds: no token is lost, except those that an engine drew behind a stop
  string before it was interrupted. They were never part of the response, and no token of the response depends on them;
- nothing runs for a sample once the chunk that ends it is returned, and the engine keeps nothing of a sample that never
  continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from april.rollout.engine import Chunk, Engine
from april.rollout.sampling import FinishReason
from april.rollout.stop_strings import Decode, StopScanner, before_stop_token, tokens_needed
from april.rollout.trajectory.routes import RouteRows
from april.rollout.trajectory.sample import Sample
from april.rollout.wrapped_engine import WrappedEngine


@dataclass(slots=True)
class _Watched:
    """A sample in flight that has stop strings."""

    scanner: StopScanner
    stop_token_ids: Sequence[int]
    length: int
    """Tokens of prompt and response so far."""
    multi_turn: bool
    """Whether it may continue behind the stop string, after its environment's answer."""


class StoppingEngine(WrappedEngine):
    """See above.

    Args:
        engine: generates the samples.
        decode: text of token ids.
    """

    def __init__(self, engine: Engine, decode: Decode) -> None:
        super().__init__(engine)
        self._decode = decode
        self._watched: dict[str, _Watched] = {}
        self._ending: dict[str, _Watched] = {}
        """Samples that have ended at a stop string, and may still run in the engine."""
        self._late_routes: dict[str, RouteRows] = {}
        """Routes of such samples that came behind the chunk that ends them."""
        self._ready: list[Chunk] = []
        """Chunks that a cancelled `poll` has not returned."""
        self._interrupting = asyncio.Lock()
        self.behind_stops = 0
        """Tokens that the engine drew behind stop strings since the last reset to 0."""

    def submit(self, sample: Sample) -> None:
        self.engine.submit(sample)  # first, because it may refuse the sample
        if stops := sample.stop_strings:
            start = sample.turn_span(len(sample.transitions) - 1)[0] if sample.transitions else 0
            known = sample.tokens_between(max(start, sample.length - tokens_needed(stops)), sample.length)
            scanner = StopScanner(self._decode, stops, known)
            length = len(sample.prompt_ids) + sample.length
            own = sample.sampling
            self._watched[sample.id] = _Watched(scanner, own.stop_token_ids, length, own.max_turns > 0)

    async def poll(self) -> list[Chunk]:
        if not self._ready and not self._ending:
            chunks = await self.engine.poll()
            self._ready += self._scan(chunks)
        if self._ending:
            await self._interrupt(set())
        ready, self._ready = self._ready, []
        return self._with_late_routes(ready)

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        chunks = await self._interrupt(named)
        ready, self._ready = self._ready, []
        if named is not None:
            self._ready = [chunk for chunk in ready if chunk.sample_id not in named]
            ready = [chunk for chunk in ready if chunk.sample_id in named]
        return self._with_late_routes([*ready, *chunks])

    async def _interrupt(self, named: set[str] | None) -> list[Chunk]:
        """Stop the named samples, and those that have ended here; return the tokens of the named ones."""
        async with self._interrupting:
            stopping = None if named is None else named | self._ending.keys()
            chunks = await self.engine.interrupt(stopping)
            kept = self._scan(chunks)
            over = []
            for id in [*self._watched, *self._ending] if stopping is None else stopping:
                self._watched.pop(id, None)
                if (ended := self._ending.pop(id, None)) is not None and not ended.multi_turn:
                    over.append(id)
            if over:  # an engine may have kept their requests, to resume them
                self.engine.forget(over)
            return kept

    def _scan(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks up to the stop strings of their samples."""
        if not self._watched and not self._ending:  # no sample has any
            return chunks
        kept = []
        for chunk in chunks:
            if (ended := self._ending.get(chunk.sample_id)) is not None:
                self.behind_stops += len(chunk.token_ids)
                self._keep_routes(chunk, ended.length)
            else:
                kept.append(self._up_to_stop(chunk))
        return kept

    def _up_to_stop(self, chunk: Chunk) -> Chunk:
        id, token_ids = chunk.sample_id, chunk.token_ids
        watched = self._watched.get(id)
        if watched is None:
            return chunk
        text_ids = token_ids
        if chunk.finish is FinishReason.STOP:
            text_ids = before_stop_token(token_ids, watched.stop_token_ids)
        count = watched.scanner.scan(text_ids)
        ended = chunk.finish is not None or chunk.error is not None
        if ended or count is not None:
            del self._watched[id]
        watched.length += len(token_ids) if count is None else count
        if count is None:
            return chunk
        if not ended:
            self._ending[id] = watched
        self.behind_stops += len(token_ids) - count
        routes = None if chunk.routes is None else chunk.routes.up_to(watched.length - 1)
        logprobs = chunk.logprobs[:count]
        return Chunk(id, token_ids[:count], logprobs, chunk.version, FinishReason.STOP, routes=routes)

    def _keep_routes(self, chunk: Chunk, end: int) -> None:
        """Keep routes of tokens before the stop string, which an engine may supply with its last chunk."""
        if chunk.routes is not None and (routes := chunk.routes.up_to(end - 1)) is not None:
            self._late_routes.setdefault(chunk.sample_id, routes)

    def _with_late_routes(self, chunks: list[Chunk]) -> list[Chunk]:
        if not self._late_routes:
            return chunks
        completed = []
        for chunk in chunks:
            if chunk.finish is not None and (late := self._late_routes.pop(chunk.sample_id, None)) is not None:
                chunk = chunk._replace(routes=late if chunk.routes is None else chunk.routes.followed_by(late))
            completed.append(chunk)
        return completed

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        named = None if sample_ids is None else set(sample_ids)
        self._ready = [] if named is None else [chunk for chunk in self._ready if chunk.sample_id not in named]
        for id in list(self._late_routes) if named is None else named:
            self._late_routes.pop(id, None)
        self.engine.forget(named)
