"""Log-probabilities of samples whose tokens generate functions made again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.scripted_turns import episode, turn
from tests.integrations.slime.source import need_slime

need_slime()

from slime.utils.types import Sample  # noqa: E402

from april.integrations.generating_code import LeftOutError  # noqa: E402
from april.integrations.slime.trajectories import fill_logprobs  # noqa: E402


def filled(turns: list[Any], prompt: list[int], response: list[int], mask: list[int]) -> tuple[list[float], list[int]]:
    """Log-probabilities and loss mask of a sample."""
    sample = Sample(tokens=[*prompt, *response], response_length=len(response), loss_mask=mask)
    fill_logprobs(episode(*turns), sample)
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask is not None
    return sample.rollout_log_probs, sample.loss_mask


def test_a_response_is_that_of_its_own_prompt() -> None:
    turns = [turn([4], 7, 2), turn([4, 5], 7, 8, 9, 2)]
    assert filled(turns, [4, 5], [7, 8, 9, 2], [1] * 4) == ([-200.0, -201.0, -202.0, -203.0], [1] * 4)
    assert filled(turns, [4], [7, 2], [1, 1]) == ([-100.0, -101.0], [1, 1])


def test_the_end_token_may_be_left_out_and_a_template_may_add_tokens() -> None:
    turns = [turn([4], 7, 8, 2), turn([4, 7, 8, 3], 9, 2)]
    assert filled(turns, [4], [7, 8, 3, 9, 2, 1], [1, 1, 0, 1, 1, 1]) == (
        [-100.0, -101.0, 0.0, -400.0, -401.0, 0.0],
        [1, 1, 0, 1, 1, 0],
    )


def test_a_span_may_begin_within_a_response() -> None:
    assert filled([turn([4], 7, 8, 9, 2)], [4], [7, 8, 9, 2], [0, 0, 1, 1]) == (
        [0.0, 0.0, -102.0, -103.0],
        [0, 0, 1, 1],
    )


def test_behind_a_prompt_that_was_tokenized_again_the_longest_match_counts() -> None:
    turns = [turn([4], 7, 2), turn([4, 5], 7, 8, 9, 2)]
    assert filled(turns, [44], [7, 8, 9, 2], [1] * 4) == ([-200.0, -201.0, -202.0, -203.0], [1] * 4)


@pytest.mark.parametrize(
    ("prompt", "response"),
    [([44], [7, 8]), ([4], [7, 5, 5]), ([44], [5])],
    ids=["two responses begin so", "other tokens than drawn behind the prompt", "drawn nowhere"],
)
def test_a_response_that_cannot_be_told_is_left_out(prompt: list[int], response: list[int]) -> None:
    turns = [turn([4], 7, 8, 2), turn([4, 5], 7, 8, 9, 2)]
    with pytest.raises(LeftOutError):
        filled(turns, prompt, response, [1] * len(response))
