"""The tokens that top-p kept, as SGLang's events say them. What it keeps is seen in tests/servers/test_slime.py."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.servers.client import RequestError
from april.integrations.support_sets import Kept

PROMPT = 3

rows = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=1, max_size=4)


def event(mask: list[list[int]] | None) -> bytes:
    return json.dumps({"output_ids": [], "meta_info": {"output_token_sampling_mask": mask, "id": "a"}}).encode()


@given(st.lists(st.tuples(rows, st.integers(0, 8), st.booleans()), min_size=1, max_size=6))
def test_every_place_has_the_tokens_that_came_with_what_stands_there(
    events: list[tuple[list[list[int]], int, bool]],
) -> None:
    """Whatever is lost and sampled again, whether events repeat what came before, and across restarts."""
    kept, expected = Kept(), list[list[int]]()
    for new, lost, restarted in events:
        expected = expected[: max(len(expected) - lost, 0)]
        said = [*expected, *new] if lost % 2 else new
        kept.read(event(said), "0.0", PROMPT + len(expected), [row[-1] for row in new])
        expected += new
        if restarted:
            kept = Kept(json.loads(json.dumps(kept.state_dict())))
    token_ids, offsets = kept.of("0.0", PROMPT)
    assert [token_ids[a:b] for a, b in pairwise(offsets)] == expected


@pytest.mark.parametrize("mask", [None, [[1]], [[1], [3]]])
def test_an_event_that_does_not_say_it_of_every_token_is_refused(mask: list[list[int]] | None) -> None:
    with pytest.raises(RequestError, match="which tokens top_p kept"):
        Kept().read(event(mask), "0.0", PROMPT, [1, 2])


def test_what_is_under_way_no_longer_is_let_go() -> None:
    kept = Kept()
    for id in ("0.0", "1.0"):
        kept.read(event([[7]]), id, PROMPT, [7])
    kept.leave({"1.0"})
    assert kept.state_dict().keys() == {"1.0"}
