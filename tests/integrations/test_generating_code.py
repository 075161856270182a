"""Trajectories that a framework's code returns, against the responses that it got."""

from __future__ import annotations

import pytest

from april.integrations.generating_code import leading_text
from april.rollout.episodes.environment import ObservationError
from tests import tiny
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


def test_each_drawn_token_has_the_log_probability_of_its_drawing() -> None:
    talk = episode(turn([4, 5], 6, 2), turn([4, 5, 6, 2, 9], 7, 8, 2, drawn=[2, 3]), turn([4], 5, 5))
    drawn = talk.drawn_in([4, 5, 6, 2, 9, 7, 8])
    assert {index: token.logprob for index, token in drawn.items()} == {
        1: -100.0,
        2: -200.0,
        3: -201.0,
        5: -500.0,
        6: -501.0,
    }


def test_of_responses_that_begin_alike_the_trajectorys_own_counts() -> None:
    first, second = turn([4, 5], 6, 7, 2), turn([4, 5], 6, 7, 8)
    for talk in (episode(first, second), episode(second, first)):
        for own in (first, second):
            drawn = talk.drawn_in(own.token_ids)
            assert [drawn[index].logprob for index in (2, 3, 4)] == list(own.logprobs)


TOKENIZER = tiny.tokenizer()
END = TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    ("said", "skip", "shown", "tokens"),
    [
        ("abc<eos>", False, "abc<eos>", 4),
        ("abc", False, "abc", 3),
        ("abc", True, "abc", 3),
        ("ab", False, "ab", 2),
        ("", False, "", 0),
    ],
    ids=["whole", "the end is trimmed", "the end is hidden", "a stop string is trimmed", "nothing is left"],
)
def test_tokens_of_a_response_that_stand_for_its_text(said: str, skip: bool, shown: str, tokens: int) -> None:
    ids = [*TOKENIZER.encode("abc", add_special_tokens=False), END]

    def decode(part: list[int]) -> str:
        return TOKENIZER.decode(part, skip_special_tokens=skip)

    assert leading_text(ids, said, decode, {END} if skip else ()) == (shown, tokens)


def test_a_hidden_token_within_a_response_ends_what_the_text_stands_for() -> None:
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)

    def decode(part: list[int]) -> str:
        return TOKENIZER.decode(part, skip_special_tokens=True)

    assert leading_text([a, END, b], "ab", decode, {END}) == ("a", 1)
