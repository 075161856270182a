"""Events as records of a journal, and back.

Invariant: `decode` gives what `encode` was given, to the last bit, or says why it cannot.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk
from april.rollout.events import Accepted, Admitted, Event, Rejected, Restarted, Rewarded, Stepped, Trained, Updated
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory import Prompt, Reward, Transition

Record: TypeAlias = tuple[int, int, str, str, bytes, bytes, int]
"""A record holds the events `first` to `number`: several for chunks, one for everything else. Its fields are number,
first, kind, body (JSON), token ids (32-bit integers), log-probabilities (64-bit floats), both little-endian, and a
checksum."""


def encode(events: Iterable[Event], first: int) -> Iterator[Record]:
    """The events, numbered from `first`, as records: chunks that follow one another share one."""
    for several, run in groupby(events, lambda event: isinstance(event, Chunk)):
        if several:
            chunks: list[Any] = list(run)
            yield _chunk_record(chunks, first)
            first += len(chunks)
        else:
            for event in run:
                yield _sealed(first, first, type(event).__name__.lower(), json.dumps(_body(event)))
                first += 1


def _chunk_record(chunks: Sequence[Chunk], first: int) -> Record:
    body = [[c.sample_id, c.version, len(c.token_ids), c.finish] for c in chunks]
    token_ids, logprobs = array("i"), array("d")
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs)
    if sys.byteorder == "big":
        token_ids.byteswap()
        logprobs.byteswap()
    last = first + len(chunks) - 1
    return _sealed(last, first, "chunks", json.dumps(body), token_ids.tobytes(), logprobs.tobytes())


def _body(event: Event) -> Any:
    match event:
        case Admitted(group_id, prompt, n, sampling, seed, prompts):
            return [group_id, prompt.to_dict(), n, sampling.to_dict(), seed, prompts]
        case Stepped(sample_id, turn, action, token_ids, transition, finish, state):
            return [sample_id, turn, action, list(token_ids), asdict(transition), finish, state]
        case Rewarded(group_id, rewards):
            return [group_id, [[index, reward.value, dict(reward.info)] for index, reward in rewards.items()]]
        case Restarted() | Accepted() | Rejected() | Updated():
            return list(event)
        case Trained(group_ids, step):
            return [list(group_ids), step.to_dict()]
    raise TypeError(f"{event!r} is no event")


def _sealed(number: int, first: int, kind: str, body: str, token_ids: bytes = b"", logprobs: bytes = b"") -> Record:
    return (number, first, kind, body, token_ids, logprobs, checksum(number, first, kind, body, token_ids, logprobs))


def checksum(number: int, first: int, kind: str, body: str, token_ids: bytes, logprobs: bytes) -> int:
    own = zlib.crc32(f"{number} {first} {kind} {body}".encode())
    return zlib.crc32(logprobs, zlib.crc32(token_ids, own))


def decode(record: Record) -> list[Event]:
    """The events of a record.

    Raises:
        ValueError: it holds none that april writes.
    """
    _, _, kind, text, token_ids, logprobs, _ = record
    try:
        body = json.loads(text)
        if kind == "chunks":
            return _chunks(body, np.frombuffer(token_ids, "<i4").tolist(), np.frombuffer(logprobs, "<f8").tolist())
        return [_event(kind, body)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _event(kind: str, body: Any) -> Event:
    match kind:
        case "admitted":
            group_id, prompt, n, sampling, seed, prompts = body
            if not isinstance(n, int) or not isinstance(seed, int) or not isinstance(group_id, int):
                raise ValueError("a group, its size or its seed is no number")
            return Admitted(group_id, Prompt.from_dict(prompt), n, SamplingParams.from_dict(sampling), seed, prompts)
        case "stepped":
            sample_id, turn, action, ids, transition, finish, state = body
            return Stepped(sample_id, turn, action, ids, Transition(**transition), _finish(finish), state)
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


def _reward(value: float, info: Mapping[str, Any]) -> Reward:
    return Reward(float(value), dict(info))


def _finish(name: str | None) -> FinishReason | None:
    return None if name is None else FinishReason(name)


def _chunks(body: Any, token_ids: list[int], logprobs: list[float]) -> list[Event]:
    events: list[Event] = []
    start = 0
    for sample_id, version, count, finish in body:
        end = start + count
        events.append(Chunk(sample_id, token_ids[start:end], logprobs[start:end], version, _finish(finish)))
        start = end
    return events
