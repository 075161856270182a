"""What a stream of events adds to a sample, and which of it is believed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.servers.client import RequestError
from april.engines.servers.stream import Delta, Stream, parse_version
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams

STOP = 99
BUDGET = 8


def stream(budget: int = BUDGET) -> Stream:
    return Stream("0.0", "0.0-a", [1, 2], SamplingParams(budget, stop_token_ids=(STOP,)), 0, budget, 0, vocab_size=100)


def feed(target: Stream, deltas: list[Delta], labelled: bool = True) -> tuple[Any, list[Chunk]]:
    """Feed events that arrive together; return the end of the stream and the chunks."""
    chunks: list[Chunk] = []
    events = [b"%d" % i for i in range(len(deltas))]
    finish = target.take_in(
        events, lambda event, _: deltas[int(event)], lambda _, chunk: chunks.append(chunk), labelled
    )
    return finish, chunks


def tokens(*ids: int, finish: Any = None, version: str | None = None) -> Delta:
    return Delta(ids, [-1.0] * len(ids), finish, version)


@given(st.lists(st.integers(0, 98), min_size=1, max_size=BUDGET - 1), st.data())
def test_tokens_arrive_once_for_any_division_into_events(ids: list[int], data: st.DataObject) -> None:
    target, received = stream(), []
    rest = [*ids, STOP]
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        _, chunks = feed(target, [tokens(token) for token in rest[:size]])
        received += [token for chunk in chunks for token in chunk.token_ids]
        rest = rest[size:]
        assert [chunk.finish for chunk in chunks] == [None if rest else FinishReason.STOP]
    assert received == [*ids, STOP]
    assert target.token_ids == [1, 2, *received]
    assert target.received == len(received)


@pytest.mark.parametrize("last", [STOP, 5])
def test_a_sample_that_ends_during_its_abort_is_finished(last: int) -> None:
    """The server reports "abort" with the token that ends the response, by stop token or by budget."""
    target = stream(budget=3)
    feed(target, [tokens(4)] if last == STOP else [tokens(4, 4)])
    finish, chunks = feed(target, [tokens(last, finish="abort")])
    assert finish is (FinishReason.STOP if last == STOP else FinishReason.LENGTH)
    assert [(list(chunk.token_ids), chunk.finish) for chunk in chunks] == [([last], finish)]


def test_an_abort_before_the_end_leaves_the_sample_unfinished() -> None:
    finish, chunks = feed(stream(), [tokens(4, finish="abort")])
    assert finish == "abort"
    assert [chunk.finish for chunk in chunks] == [None]


def test_tokens_of_a_frozen_server_keep_the_version_at_the_freeze() -> None:
    """A server labels late tokens with the version of its current weights."""
    target = stream()
    feed(target, [tokens(1, version="0")])
    _, late = feed(target, [tokens(2, version="1")], labelled=False)
    target.version = 1
    _, after = feed(target, [tokens(3, version="1"), tokens(4)])
    assert [(list(chunk.token_ids), chunk.version) for chunk in [*late, *after]] == [([2], 0), ([3, 4], 1)]


def test_each_version_has_a_separate_chunk() -> None:
    target = stream()
    _, chunks = feed(target, [tokens(4, version="0"), tokens(5, version="v3"), tokens(6, version="3")])
    assert [(chunk.version, list(chunk.token_ids)) for chunk in chunks] == [(0, [4]), (3, [5, 6])]
    assert target.spans == [(0, 0), (3, 1)]


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (tokens(100), "outside the vocabulary"),
        (tokens(-1), "outside the vocabulary"),
        (Delta([4], [0.5]), "log-probability 0.5"),
        (Delta([4], [float("nan")]), "log-probability nan"),
        (Delta([4], [-float("inf")]), "log-probability -inf"),
        (Delta([4], []), "1 tokens came with 0 log-probabilities"),
        (tokens(*[4] * BUDGET), f"{BUDGET + 1} tokens came where {BUDGET} were asked for"),
        (tokens(4, finish=FinishReason.STOP), "with no stop token"),
        (tokens(4, finish=FinishReason.LENGTH), f"after 2 tokens, with no stop token, where {BUDGET}"),
    ],
)
def test_valid_events_before_an_invalid_event_are_kept(nonsense: Delta, message: str) -> None:
    chunks: list[Chunk] = []
    deltas = [tokens(7), nonsense]
    with pytest.raises(RequestError, match=message):
        stream().take_in([b"", b""], lambda *_: deltas.pop(0), lambda _, chunk: chunks.append(chunk))
    assert chunks[0].token_ids[0] == 7
    assert all(chunk.finish is None for chunk in chunks)


@pytest.mark.parametrize(("label", "version"), [("12", 12), ("v12", 12), ("default", None), ("", None), ("1.2", None)])
def test_versions_in_labels(label: str, version: int | None) -> None:
    assert parse_version(label) == version
