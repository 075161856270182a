"""The column of routes: which rows a sample takes, and that journal, checkpoint and transport keep them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from april import Chunk, FinishReason, Group, Prompt, RolloutParams, SamplingParams
from april.engines.packed import pack, unpack
from april.rollout.events import Admitted, Updated
from april.rollout.journal.records import RECORD_BYTES, decode, encode
from april.rollout.scheduler import RolloutScheduler
from april.rollout.state import RolloutState
from april.rollout.state_files import pack_state, unpack_state
from april.rollout.trajectory.routes import RouteRows, Routes, route_dtype, unknown
from tests.scripted_engine import ScriptedEngine

LAYERS, TOP_K, PROMPT = 3, 2, 4
DTYPE = np.dtype(np.uint8)


def rows(start: int, values: list[int]) -> RouteRows:
    """Rows whose experts are all the value given for each."""
    return RouteRows(start, np.repeat(np.array(values, DTYPE), LAYERS * TOP_K).reshape(-1, LAYERS, TOP_K))


def group(n: int = 1) -> Group:
    return Group.start(0, Prompt(tuple(range(2, 2 + PROMPT))), n, SamplingParams(1000, stop_token_ids=(1,)), 3)


PIECES = st.lists(
    st.tuples(
        st.integers(0, 4),  # tokens
        st.integers(0, 1),  # growth of the version before them
        st.integers(-12, 3),  # place of the first row, from the first token of the piece
        st.integers(0, 12),  # rows
    ),
    max_size=10,
)


@given(PIECES, st.sampled_from([(False, False), (True, False), (False, True)]))
def test_a_row_is_of_the_version_that_drew_the_next_token_or_the_latest(
    pieces: list[tuple[int, int, int, int]], kind: tuple[bool, bool]
) -> None:
    """With `fill`, the first version that supplies a row supplies it for good."""
    (latest, fill), sample, version, filled = kind, group().samples[0], 0, 0
    expected: dict[int, int] = {}
    drawn_by: dict[int, int] = {}
    for number, (count, growth, offset, size) in enumerate(pieces):
        version += growth
        end = PROMPT + sample.length + count
        start = min(max(PROMPT + sample.length + offset, 0), end - 1)
        given_rows = rows(start, [number] * min(size, end - 1 - start))
        sample.check_routes(given_rows, count)
        sample.extend([5] * count, [-0.5] * count, version)
        drawn_by |= dict.fromkeys(range(end - count, end), version)
        sample.route(given_rows, version, latest, fill)
        for place in range(start, given_rows.end):
            own = drawn_by.get(place + 1, version) == version
            if latest or (place not in expected and (own or fill)):
                filled += not own and not latest
                expected[place] = number
    if sample.routes is not None:
        found = {i: int(row[0, 0]) for i, row in enumerate(sample.routes.experts) if row[0, 0] != unknown(DTYPE)}
        assert found == expected
        assert all(len(set(row.flatten().tolist())) == 1 for row in sample.routes.experts), "a row is whole or unknown"
    assert sample.filled_routes == filled
    assert sample.missing_routes == PROMPT + sample.length - 1 - len(expected) + filled
    saved = Group.from_dict(group().to_dict() | {"samples": [sample.to_dict()]}).samples[0]
    assert (saved.routes, saved.filled_routes) == (sample.routes, filled)


@given(PIECES, st.sampled_from([200, 256, 300]))
def test_journal_checkpoint_and_transport_keep_every_row(pieces: list[tuple[int, int, int, int]], experts: int) -> None:
    dtype = route_dtype(experts)
    generator, chunks, state = np.random.default_rng(0), list[Chunk](), _state()
    for count, growth, _, size in pieces:
        for _ in range(growth):
            state.apply(Updated(state.engine_version + 1))
        sample = state.buffer.find("0.0")
        known = 0 if sample.routes is None else sample.routes.length
        ready = PROMPT + sample.length + count - 1 - known
        own = generator.integers(0, experts, (min(size, max(ready, 0)), LAYERS, TOP_K)).astype(dtype)
        routes = RouteRows(known, own) if len(own) else None
        chunk = Chunk("0.0", [5] * count, [-0.5] * count, state.engine_version, routes=routes)
        state.apply(chunk)
        chunks.append(chunk)
    read = [event for record in encode(chunks, 1) for event in decode(record)]
    assert read == chunks
    assert [tuple(map(_plain, chunk)) for chunk in unpack(pickle.loads(pickle.dumps(pack(chunks))))] == [
        tuple(map(_plain, chunk)) for chunk in chunks
    ]
    kept = state.buffer.groups[0]
    text, pieces = pack_state(kept.to_dict())
    assert Group.from_dict(unpack_state(text, b"".join(pieces), "routes")) == kept


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "typecode") else value


def _state() -> RolloutState:
    scheduler = RolloutScheduler(
        ScriptedEngine(), [], lambda *_: 0.0, RolloutParams(rollout_batch_size=1, n_samples_per_prompt=1)
    )
    state = scheduler.state
    state.apply(Admitted(0, Prompt((2, 3, 4, 5)), 1, SamplingParams(1000, stop_token_ids=(1,)), 3, None))
    return state


def test_what_breaks_a_rule_is_refused_and_nothing_is_kept() -> None:
    state = _state()
    state.apply(Chunk("0.0", [5, 6], [-1.0, -1.0], 0, routes=rows(0, [1, 2, 3, 4, 5])))
    other = RouteRows(5, np.zeros((1, LAYERS + 1, TOP_K), DTYPE))
    behind = rows(5, [1, 1])
    for wrong, message in ((other, "of another model"), (behind, "routes of tokens 5 to 7 came, of which 6")):
        broken = state.absorb([Chunk("0.0", [7], [-1.0], 0, routes=wrong)]).broken
        assert len(broken) == 1
        assert message in str(broken[0])
    sample = state.buffer.find("0.0")
    assert sample.response_ids == [5, 6]
    assert sample.routes is not None
    assert sample.routes.length == 5


def test_routes_without_tokens_are_taken_also_behind_the_last_token_of_a_lost_request() -> None:
    state = _state()
    state.apply(Chunk("0.0", [5, 6, 7], [-1.0] * 3, 0))  # streamed, before the server died
    sample = state.buffer.find("0.0")
    assert sample.missing_routes == 6
    state.apply(Updated(1))
    state.apply(Chunk("0.0", [8], [-1.0], 1, routes=rows(0, list(range(7)))))
    # Tokens 4, 5 and 6 were drawn by version 0, and their rows, 3 to 5, are lost.
    assert sample.routes is not None
    assert sample.routes.known.tolist() == [True] * 3 + [False] * 3 + [True]
    state.apply(Chunk("0.0", [], [], 1, FinishReason.STOP))
    assert sample.missing_routes == 3


def test_a_draft_and_a_restarted_episode_begin_without_routes() -> None:
    sample = group().samples[0]
    sample.extend([5, 6], [-1.0, -1.0], 0)
    sample.route(rows(0, [1] * 5), 0, False)
    sample.redraft()
    assert sample.routes is None
    sample.route(rows(0, [1] * 3), 0, False)
    sample.restart()
    assert sample.routes is None


def test_an_engine_elsewhere_gets_the_length_of_routes_alone() -> None:
    sample = group().samples[0]
    assert sample.with_outlined_routes() is sample
    sample.extend([5] * 100, [-1.0] * 100, 0)
    sample.route(RouteRows(0, np.zeros((103, 48, 8), DTYPE)), 0, False)
    sent = pickle.dumps(sample.with_outlined_routes())
    received = pickle.loads(sent).routes
    assert isinstance(received, Routes)
    assert received.length == 103
    assert len(sent) < 48 * 8 * 20, "a fraction of the rows"
    assert sample.routes is not None
    assert sample.routes.nbytes == 103 * 48 * 8


def test_a_record_of_the_journal_is_bounded_also_with_routes() -> None:
    sizes = [100, 3000, 700, 1, 0, 1500, 1500, 400]
    chunks = [
        Chunk(f"0.{number}", [5], [-0.5], 0, routes=RouteRows(0, np.full((size, 48, 8), number, DTYPE)))
        for number, size in enumerate(sizes)
    ]
    records = list(encode(chunks, 1))
    assert [event for record in records for event in decode(record)] == chunks
    assert all(len(record.content) < RECORD_BYTES + 4096 for record in records if record.last > record.first)
    assert len(records) < len(chunks), "small chunks share a record"
