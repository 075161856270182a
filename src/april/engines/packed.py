"""Chunks packed into a few arrays, to be sent to another process without an object for every token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from april.rollout.engine import Chunk, Fault
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.routes import RouteRows

FINISHES = (None, *FinishReason)


class PackedChunks(NamedTuple):
    """Chunks one after the other: their token ids and log-probabilities in a row, and for each chunk its sample, its
    number of tokens, its version, and the place of its finish reason in `FINISHES`; errors and their kinds, and routes,
    by the chunk's place."""

    sample_ids: list[str]
    counts: array[int]
    versions: array[int]
    finishes: bytes
    token_ids: array[int]
    logprobs: array[float]
    errors: dict[int, tuple[str, Fault]]
    routes: dict[int, RouteRows]


def pack(chunks: Sequence[Chunk]) -> PackedChunks:
    token_ids, logprobs = array("i"), array("d")
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs)
    return PackedChunks(
        [chunk.sample_id for chunk in chunks],
        array("i", [len(chunk.token_ids) for chunk in chunks]),
        array("i", [chunk.version for chunk in chunks]),
        bytes([FINISHES.index(chunk.finish) for chunk in chunks]),
        token_ids,
        logprobs,
        {i: (chunk.error, chunk.fault) for i, chunk in enumerate(chunks) if chunk.error is not None},
        {i: chunk.routes for i, chunk in enumerate(chunks) if chunk.routes is not None},
    )


def unpack(packed: PackedChunks) -> list[Chunk]:
    """Return the chunks; their tokens are slices of the arrays."""
    token_ids, logprobs, errors = packed.token_ids, packed.logprobs, packed.errors
    ends = pairwise(accumulate(packed.counts, initial=0))
    places = zip(packed.sample_ids, ends, packed.versions, packed.finishes, strict=True)
    chunks = [
        Chunk(sample_id, token_ids[a:b], logprobs[a:b], version, FINISHES[finish], *errors.get(i, ()))
        for i, (sample_id, (a, b), version, finish) in enumerate(places)
    ]
    for i, routes in packed.routes.items():
        chunks[i] = chunks[i]._replace(routes=routes)
    return chunks
