"""Verdicts of the canary: rounding passes, other policies do not, whatever a single token says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from april.rollout.engine import EngineError
from april.training.canary import GROSS, Canary, Scores, canary_tokens, least_band

TOKENS = canary_tokens(1000)
EXPECTED: Scores = [[-9.0 - i for i in range(len(sequence) - 1)] for sequence in TOKENS]
FLOOR = least_band(torch.bfloat16)


class Shifted:
    """A replica whose scores differ from the trainer's by given amounts, in turn."""

    name = "replica 0"

    def __init__(self, *shifts: float) -> None:
        self.shifts = shifts

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        own = EXPECTED[TOKENS.index(list(token_ids))]
        return [score + self.shifts[i % len(self.shifts)] for i, score in enumerate(own)]


def canary(directory: Path, gap: float = 0.0, resumed: bool = False) -> Canary:
    made = Canary(TOKENS, directory, resumed, FLOOR)
    made.expected = EXPECTED
    if not resumed:
        made.set_band([[[score + gap for score in scores] for scores in EXPECTED]])
    return made


async def test_a_token_that_rounding_changed_by_a_lot_does_not_decide(tmp_path: Path) -> None:
    made = canary(tmp_path, 0.02)
    await made.verify(Shifted(*([0.01] * 14), 3.0))
    assert made.gaps["replica 0"] == pytest.approx((14 * 0.01 + 3.0) / 15)


async def test_a_difference_that_stays_after_a_second_update_is_accepted_unless_it_is_gross(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = canary(tmp_path)
    with pytest.raises(EngineError, match=r"another policy than the trainer .* differ by 0\.5 nats in the mean"):
        await made.verify(Shifted(0.5))
    await made.verify(Shifted(0.5))
    assert "it stays after a second update, and is accepted" in caplog.text
    with pytest.raises(EngineError, match="another policy"):
        await made.verify(Shifted(0.7))
    for shift in (GROSS + 0.1, math.inf, math.nan):
        for _ in range(3):
            with pytest.raises(EngineError, match="another policy"):
                await made.verify(Shifted(shift))


async def test_the_band_follows_recent_differences_and_is_kept(tmp_path: Path) -> None:
    made = canary(tmp_path, 0.01)
    assert made.band == FLOOR
    for _ in range(8):
        await made.verify(Shifted(0.2))
    assert made.band == pytest.approx(0.8)
    assert canary(tmp_path, resumed=True).band == pytest.approx(0.8)
    for _ in range(8):
        await made.verify(Shifted(0.7))
    assert made.band == GROSS, "never wider"


def test_a_gap_before_the_first_update_is_refused_only_if_it_is_gross(tmp_path: Path) -> None:
    canary(tmp_path, 1.5)
    for gap in (GROSS + 0.1, math.inf, math.nan):
        with pytest.raises(EngineError, match=r"before any update, .* they compute different policies"):
            canary(tmp_path, gap)


def test_types_of_two_bytes_have_a_wider_least_band() -> None:
    bands = [least_band(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert bands[0] < bands[1] == bands[2]


class Following:
    """A replica whose scores are those of the trainer at some update, with a difference of arithmetic per token that is
    constant and another that each update draws anew."""

    name = "replica 0"

    def __init__(self, rounding: float) -> None:
        self.rounding = rounding
        self.drawn = random.Random(1)
        self.constant = [[self.drawn.gauss(0, 0.02) for _ in scores] for scores in EXPECTED]
        self.holds = EXPECTED

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        index = TOKENS.index(list(token_ids))
        pairs = zip(self.holds[index], self.constant[index], strict=True)
        return [score + constant + self.drawn.gauss(0, self.rounding) for score, constant in pairs]


def trained(scores: Scores, seed: int, change: float) -> Scores:
    """Scores after an update that changes each token's by about `change` nats."""
    drawn = random.Random(seed)
    return [[score + drawn.gauss(0, change) for score in own] for own in scores]


async def missing_updates_until_found(made: Canary, replica: Following, change: float) -> int:
    """Train without giving the replica the weights until the canary finds that; return the number of updates."""
    for missing in range(1, 500):
        made.expected = trained(made.expected, 1000 + missing, change)
        try:
            await made.verify(replica)
        except EngineError as error:
            if "did not reach replica 0" in str(error):
                return missing
            raise
    raise AssertionError("the canary found nothing")


@pytest.mark.parametrize(
    ("change", "rounding", "found_within"), [(1e-4, 0.0, 1), (1e-2, 1e-3, 1), (1e-3, 3e-3, 100), (1e-2, 2e-2, 100)]
)
async def test_small_updates_that_do_not_arrive_are_found_however_wide_the_band_is(
    tmp_path: Path, change: float, rounding: float, found_within: int
) -> None:
    made, replica = canary(tmp_path, 0.02), Following(rounding)
    for update in range(100):
        made.expected = replica.holds = trained(made.expected, update, change)
        await made.verify(replica)
    assert await missing_updates_until_found(made, replica, change) <= found_within
    replica.holds = made.expected
    await made.verify(replica)


async def test_rounding_of_the_trainers_scores_is_no_missing_update(tmp_path: Path) -> None:
    made, replica = canary(tmp_path, 0.02), Following(1e-2)
    for update in range(200):
        replica.holds = trained(replica.holds, update, 1e-3)
        made.expected = trained(replica.holds, 1000 + update, 1e-2)
        await made.verify(replica)
    missing = 0
    while missing < 500:
        missing += 1
        made.expected = trained(replica.holds, 2000 + missing, missing * 1e-3)
        try:
            await made.verify(replica)
        except EngineError:
            break
    assert missing < 100


async def test_an_update_that_changes_nothing_is_no_fault(tmp_path: Path) -> None:
    made, replica = canary(tmp_path, 0.02), Following(1e-3)
    for _ in range(20):
        await made.verify(replica)
