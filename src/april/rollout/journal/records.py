"""Events as bytes for the journal, and back.

Invariant: `decode` returns the events that `encode` was given, bit for bit, or raises ValueError.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk
from april.rollout.events import (
    Accepted,
    Admitted,
    Branched,
    Ended,
    Event,
    Rejected,
    Restarted,
    Rewarded,
    Stepped,
    Trained,
    Updated,
)
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature, features_from_json, features_to_json
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.routes import RouteRows, decode_experts, encode_experts
from april.rollout.trajectory.transition import Transition

TOKEN_BYTES = 12
"""Bytes of a token and its log-probability."""
RECORD_BYTES = 1 << 20
"""Bytes of the columns of a record with more than one chunk, at most: they bound the memory for reading and writing one
record, whose length takes 32 bits."""
HEAD_LENGTH = struct.Struct("<I")


class Record(NamedTuple):
    """Consecutive events as bytes: several chunks, or one event of any other kind.

    The content is the length of a head, the head, and the per-token columns, one after the other. The head is JSON: the
    kind, a body, and the length of each column in bytes. Chunks have two columns, token ids as 32-bit integers and
    log-probabilities as 64-bit floats, both little-endian, and a third one if any chunk has routes: their experts.
    """

    first: int
    """Number of the first event."""
    last: int
    """Number of the last event."""
    content: bytes


def encode(events: Iterable[Event], first: int) -> Iterator[Record]:
    """Return the events as records, numbered from `first`; consecutive chunks share a record."""
    for are_chunks, run in groupby(events, lambda event: isinstance(event, Chunk)):
        if are_chunks:
            for chunks in _chunk_batches(run):
                yield Record(first, first + len(chunks) - 1, _chunk_content(chunks))
                first += len(chunks)
        else:
            for event in run:
                yield Record(first, first, _content(type(event).__name__.lower(), _body(event)))
                first += 1


def chunk_bytes(chunk: Chunk) -> int:
    """Return the bytes of a chunk in the columns of its record."""
    return TOKEN_BYTES * len(chunk.token_ids) + (0 if chunk.routes is None else chunk.routes.experts.nbytes)


def _chunk_batches(chunks: Iterable[Any]) -> Iterator[Sequence[Any]]:
    batch: list[Any] = []
    held = 0
    for chunk in chunks:
        size = chunk_bytes(chunk)
        if batch and held + size > RECORD_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(chunk)
        held += size
    if batch:
        yield batch


def _chunk_content(chunks: Sequence[Chunk]) -> bytes:
    routed = zip(chunks, _places(chunks), strict=True)
    body = [[c.sample_id, c.version, len(c.token_ids), c.finish, *place] for c, place in routed]
    token_ids, logprobs = array("i"), array("d")
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs)
    if sys.byteorder == "big":
        token_ids.byteswap()
        logprobs.byteswap()
    columns: list[Sequence[bytes | memoryview]] = [[token_ids.tobytes()], [logprobs.tobytes()]]
    if routes := [encode_experts(chunk.routes.experts) for chunk in chunks if chunk.routes is not None]:
        columns.append(routes)
    return _content("chunks", body, *columns)


def _places(chunks: Iterable[Chunk]) -> Iterator[list[Any]]:
    """Yield for each chunk the place of its routes: first token, rows and, if they differ from those of the routes
    before, layers, experts of a token and type; nothing if it has none."""
    last: list[Any] = []
    for chunk in chunks:
        if chunk.routes is None:
            yield []
        else:
            experts = chunk.routes.experts
            form = [*experts.shape[1:], experts.dtype.name]
            yield [[chunk.routes.start, len(experts), *([] if form == last else form)]]
            last = form


def _content(kind: str, body: Any, *columns: Sequence[bytes | memoryview]) -> bytes:
    """Return the content of a record, whose columns are given in pieces."""
    head = json.dumps([kind, body, [sum(map(len, column)) for column in columns]]).encode()
    return b"".join((HEAD_LENGTH.pack(len(head)), head, *(piece for column in columns for piece in column)))


def _body(event: Event) -> Any:
    match event:
        case Admitted(group_id, prompt, n, sampling, seed, prompts):
            return [group_id, prompt.to_dict(), n, sampling.to_dict(), seed, prompts]
        case Stepped(sample_id, turn, action, token_ids, transition, finish, state, features):
            body = [sample_id, turn, action, list(token_ids), asdict(transition), finish, state]
            return [*body, *_images(features)]
        case Branched(group_id, index, episode, parent, shared, token_ids, transition, features):
            body = [group_id, index, episode, parent, shared, list(token_ids), asdict(transition)]
            return [*body, *_images(features)]
        case Ended(group_id, episode, last, finish, transition):
            return [group_id, episode, last, finish, asdict(transition)]
        case Rewarded(group_id, rewards):
            return [group_id, [[index, reward.value, dict(reward.info)] for index, reward in rewards.items()]]
        case Restarted() | Accepted() | Rejected() | Updated():
            return list(event)
        case Trained(group_ids, step):
            return [list(group_ids), step.to_dict()]
    raise TypeError(f"{event!r} is no event")


def _images(features: Sequence[Feature]) -> list[Any]:
    """Return the end of a body, with the images of an event that has any."""
    return [features_to_json(features)] if features else []


def decode(record: Record) -> list[Event]:
    """Return the events of a record.

    Raises:
        ValueError: the content holds no events.
    """
    try:
        kind, body, columns = _parts(record.content)
        if kind == "chunks":
            token_ids, logprobs, *routes = columns
            ids, drawn = np.frombuffer(token_ids, "<i4").tolist(), np.frombuffer(logprobs, "<f8").tolist()
            events = _chunks(body, ids, drawn, routes[0] if routes else memoryview(b""))
        else:
            events = [_event(kind, body)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(events) != record.last - record.first + 1:
        raise ValueError(f"{len(events)} events where {record.last - record.first + 1} were expected")
    return events


def _parts(content: bytes) -> tuple[str, Any, list[memoryview]]:
    (length,) = HEAD_LENGTH.unpack_from(content)
    end = HEAD_LENGTH.size + length
    kind, body, sizes = json.loads(content[HEAD_LENGTH.size : end])
    columns, whole = [], memoryview(content)
    for size in sizes:
        columns.append(whole[end : end + size])
        end += size
    return kind, body, columns


def _event(kind: str, body: Any) -> Event:
    match kind:
        case "admitted":
            group_id, prompt, n, sampling, seed, prompts = body
            # A NamedTuple accepts any types; a wrong one would fail only when the event is applied.
            if not isinstance(n, int) or not isinstance(seed, int) or not isinstance(group_id, int):
                raise ValueError("a group, its size or its seed is no number")
            return Admitted(group_id, Prompt.from_dict(prompt), n, SamplingParams.from_dict(sampling), seed, prompts)
        case "stepped":
            sample_id, turn, action, ids, transition, finish, state, *images = body
            answered, features = Transition(**transition), _features(*images)
            return Stepped(sample_id, turn, action, ids, answered, _finish(finish), state, features)
        case "branched":
            group_id, index, episode, parent, shared, ids, transition, *images = body
            asked, features = Transition(**transition), _features(*images)
            return Branched(group_id, index, episode, parent, shared, ids, asked, features)
        case "ended":
            group_id, episode, last, finish, transition = body
            return Ended(group_id, episode, last, FinishReason(finish), Transition(**transition))
        case "restarted":
            return Restarted(*body)
        case "rewarded":
            return Rewarded(body[0], {index: _reward(value, info) for index, value, info in body[1]})
        case "accepted":
            return Accepted(*body)
        case "rejected":
            return Rejected(body[0], Rejection(body[1]))
        case "trained":
            return Trained(body[0], RolloutBatch.from_dict(body[1]))
        case "updated":
            return Updated(*body)
    raise ValueError(f"its kind {kind!r} is not known")


def _features(saved: Sequence[Any] = ()) -> tuple[Feature, ...]:
    return features_from_json(saved)


def _reward(value: float, info: Mapping[str, Any]) -> Reward:
    return Reward(float(value), dict(info))


def _finish(name: str | None) -> FinishReason | None:
    return None if name is None else FinishReason(name)


def _chunks(body: Any, token_ids: list[int], logprobs: list[float], routes: memoryview) -> list[Event]:
    events: list[Event] = []
    start = used = 0
    form: list[Any] = []
    for sample_id, version, count, finish, *routed in body:
        end = start + count
        chunk = Chunk(sample_id, token_ids[start:end], logprobs[start:end], version, _finish(finish))
        start = end
        for first, rows, *own in routed:
            layers, top_k, dtype = form = own or form
            size = rows * layers * top_k * np.dtype(dtype).itemsize
            experts = decode_experts(routes[used : used + size], (rows, layers, top_k), dtype)
            chunk = chunk._replace(routes=RouteRows(first, experts))
            used += size
        events.append(chunk)
    return events
