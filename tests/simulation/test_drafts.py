from __future__ import annotations

import pytest

from april.simulation.drafts import best_draft, crossover, tokens_of_a_pass
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline

COST = roofline(GPUS["h100"], MODELS["qwen3-8b"], Roofline(slots=512))


def test_a_pass_without_a_draft_is_a_decode_step() -> None:
    for batch in (1, 64, 512):
        step = COST.base()[batch] + COST.kv_token_seconds * batch * 1000
        assert COST.verification(batch, 0, 1000) == pytest.approx(step)


def test_verifying_is_free_as_long_as_reading_the_weights_takes_longer() -> None:
    assert COST.verification(1, 8, 1000) == pytest.approx(COST.verification(1, 0, 1000))
    assert COST.verification(7, 8, 1000) == pytest.approx(COST.verification(7, 0, 1000), rel=1e-3)
    many, few = COST.verification(512, 8, 100), COST.verification(512, 4, 100)
    assert many - few == pytest.approx(512 * 4 * COST.prefill_token_seconds, rel=1e-6)


def test_attention_reads_the_cache_of_a_sample_once_and_computes_for_each_of_its_tokens() -> None:
    one, eight = COST.verification(4, 0, 16_000), COST.verification(4, 8, 16_000)
    assert eight == pytest.approx(one), "reading takes longer than computing nine queries"
    slow = COST.verification(4, 200, 16_000) - COST.verification(4, 200, 8_000)
    assert slow == pytest.approx(4 * 201 * 8_000 * 2 * COST.prefill_pair_seconds)


def test_a_lone_sample_gets_what_it_accepts_and_a_full_batch_of_short_ones_drafts_nothing() -> None:
    lone = best_draft(COST, 1, 1000, acceptance=0.7)
    assert (lone.drafted, lone.times) == (8, pytest.approx(tokens_of_a_pass(8, 0.7)))
    assert best_draft(COST, 512, 300, acceptance=0.4).drafted == 0
    assert best_draft(COST, 1, 1000, acceptance=0.7, coverage=0.5).times == pytest.approx((lone.times + 1) / 2)


def test_the_crossover_is_the_last_batch_that_gains() -> None:
    at = crossover(COST, 300, acceptance=0.4, times=1.05)
    assert best_draft(COST, at, 300, 0.4).times >= 1.05 > best_draft(COST, at + 1, 300, 0.4).times
    held = int(COST.kv_tokens / 16_000)
    assert crossover(COST, 16_000, acceptance=0.7, times=1.05) == held, "reading long caches is what a pass waits for"
