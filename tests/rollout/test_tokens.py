"""The check of all sampled tokens, against a plain one."""

from __future__ import annotations

import sys
from math import inf, isfinite, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.rollout.trajectory.tokens import DOUBLE_SIGNS, INT_SIGNS, MAX_LOGPROB, checked_tokens

EDGES = [0.0, -0.0, MAX_LOGPROB, MAX_LOGPROB * 1.001, 1.0, -1e308, 5e-324, -5e-324, inf, -inf, nan]


@given(
    st.lists(st.integers(0, 2**31 - 1) | st.integers(-(2**31), 2**31 - 1)),
    st.lists(st.floats(-100, 0) | st.floats() | st.sampled_from(EDGES)),
)
@settings(max_examples=500, deadline=None)
def test_what_is_refused(ids: list[int], drawn: list[float]) -> None:
    valid = all(one >= 0 for one in ids) and isfinite(sum(drawn)) and all(one <= MAX_LOGPROB for one in drawn)
    if valid:
        kept_ids, kept = checked_tokens(ids, drawn)
        assert (list(kept_ids), list(kept)) == (ids, drawn)
    else:
        with pytest.raises(ValueError, match=r"is negative|is no finite number|above 0"):
            checked_tokens(ids, drawn)


def test_the_sign_bytes_are_those_of_this_machine() -> None:
    assert (1).to_bytes(4, sys.byteorder)[INT_SIGNS] == b"\0"
    assert (2**31).to_bytes(4, sys.byteorder)[INT_SIGNS] == b"\x80"
    assert (2**63).to_bytes(8, sys.byteorder)[DOUBLE_SIGNS] == b"\x80"


def test_no_loop_over_all_numbers_checks_a_usual_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(numbers: object) -> None:
        raise AssertionError("a loop over all numbers")

    for name in ("min", "max"):
        monkeypatch.setattr(f"april.rollout.trajectory.tokens.{name}", loop, raising=False)
    checked_tokens([5, 7], [-0.5, -1.0])
