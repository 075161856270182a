"""Support sets read from SGLang's events. tests/servers/test_slime.py checks them against a real server."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.servers.client import RequestError
from april.integrations.support_sets import SupportSets

PROMPT = 3

rows = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=1, max_size=4)


def event(mask: list[list[int]] | None) -> bytes:
    return json.dumps({"output_ids": [], "meta_info": {"output_token_sampling_mask": mask, "id": "a"}}).encode()


@given(st.lists(st.tuples(rows, st.integers(0, 8), st.booleans()), min_size=1, max_size=6))
def test_every_position_has_the_support_set_sent_with_its_token(
    events: list[tuple[list[list[int]], int, bool]],
) -> None:
    """For any loss and repetition of tokens, with repeated support sets in events, and across restarts."""
    sets, expected = SupportSets(), list[list[int]]()
    for new, lost, restarted in events:
        expected = expected[: max(len(expected) - lost, 0)]
        sent = [*expected, *new] if lost % 2 else new
        sets.read(event(sent), "0.0", PROMPT + len(expected), [row[-1] for row in new])
        expected += new
        if restarted:
            sets = SupportSets(json.loads(json.dumps(sets.state_dict())))
    for length in (len(expected), len(expected) - 1):  # a token behind a stop string is left out
        token_ids, offsets = sets.of("0.0", PROMPT, length)
        assert [token_ids[a:b] for a, b in pairwise(offsets)] == expected[:length]


@pytest.mark.parametrize("mask", [None, [[1]], [[1], [3]]])
def test_an_event_without_a_support_set_for_each_token_is_refused(mask: list[list[int]] | None) -> None:
    with pytest.raises(RequestError, match="the tokens that top_p kept"):
        SupportSets().read(event(mask), "0.0", PROMPT, [1, 2])


def test_support_sets_of_finished_samples_are_dropped() -> None:
    sets = SupportSets()
    for id in ("0.0", "1.0"):
        sets.read(event([[7]]), id, PROMPT, [7])
    sets.keep({"1.0"})
    assert sets.state_dict().keys() == {"1.0"}
