"""Trajectories that a framework's code returns, against the responses that it got."""

from __future__ import annotations

import pytest

from april.rollout.episodes.environment import ObservationError
from tests.integrations.scripted_turns import episode, turn


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_code_may_leave_out_the_end_of_its_last_response(kept: int) -> None:
    talk = episode(turn([4, 5], 6, 2), turn([4, 5, 6, 2, 9], 7, 8, 2, drawn=[2, 3]))
    tokens = [4, 5, 6, 2, 9, 7, 8, 2][: 5 + kept]
    talk.check(tokens, [False, False, True, True, False, *[True] * kept])


@pytest.mark.parametrize(
    ("tokens", "trained", "wrong"),
    [
        ([4, 5, 6, 3], [0, 0, 1, 1], 3),
        ([4, 5, 6, 2, 9], [0, 0, 1, 1, 1], 4),
        ([4, 6, 2], [0, 1, 1], 1),
        ([4, 5, 6, 2, 8, 7], [0, 0, 1, 1, 0, 1], 5),
    ],
    ids=["another token", "behind the response", "another prompt", "behind another message"],
)
def test_a_token_that_the_policy_did_not_draw_there_is_named(tokens: list[int], trained: list[int], wrong: int) -> None:
    talk = episode(turn([4, 5], 6, 2), turn([4, 5, 6, 2, 9], 7, drawn=[2, 3]))
    with pytest.raises(ObservationError, match=f"token {wrong} of the trajectory"):
        talk.check(tokens, [bool(counts) for counts in trained])
