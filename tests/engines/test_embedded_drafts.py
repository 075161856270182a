"""Drafts change how many tokens a pass samples, and never which."""

from __future__ import annotations

import asyncio
import copy
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Prompt, RolloutParams, RolloutScheduler, Sample, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.drafts import PassCosts, Past
from april.rollout.journal import Journal
from tests.engines.architectures import (
    DEVICE,
    append,
    assert_behaviour,
    cached,
    continuation,
    model,
    perturb,
    reference,
    responses,
    run,
    samples,
)
from tests.engines.test_redraft import Counted
from tests.rollout.test_journal import cut, numbers

pytestmark = pytest.mark.usefixtures("drafts_whatever_they_cost")

POLICY = model().double()
"""In float64: what a token shares a pass with changes the rounding of its log-probability, in float32 by up to 1e-5."""
SETTINGS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.4}


def engine(**config: Any) -> EmbeddedEngine:
    return EmbeddedEngine(POLICY, **{"kv_cache_bytes": 1 << 25, "max_num_seqs": 8, **config})


PLAIN = asyncio.run(run(engine(), samples(**SETTINGS)))
UNDRAFTED = responses(PLAIN)


async def polls(subject: EmbeddedEngine, done: list[Sample]) -> int:
    for sample in done:
        subject.submit(sample)
    count = 0
    while chunks := await subject.poll():
        append(done, chunks)
        count += 1
    return count


async def experienced(**config: Any) -> EmbeddedEngine:
    """An engine that has seen every answer before, beside others to the same prompts: most drafts hold, some do not."""
    subject = engine(draft_tokens=8, **config)
    await run(subject, samples(**SETTINGS))
    await run(subject, samples(**SETTINGS, seed=8))
    return subject


async def test_fewer_passes_sample_the_same_tokens() -> None:
    done = samples(**SETTINGS)
    drafted = await polls(await experienced(max_num_seqs=9), done)
    assert responses(done) == UNDRAFTED
    assert_behaviour(POLICY, done)
    assert drafted < 0.7 * await polls(engine(max_num_seqs=9), samples(**SETTINGS))


@settings(max_examples=8, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.booleans()), max_size=3),
    max_num_seqs=st.integers(1, 9),
    kv_cache_bytes=st.sampled_from([1 << 25, 400_000, 220_000]),
    on_update=st.sampled_from(["keep", "recompute"]),
    stream_interval=st.integers(1, 4),
)
def test_no_schedule_changes_a_token(rounds: list[tuple[int, int, bool]], **config: Any) -> None:
    """Interrupts at any pass, updates to the same weights, caches that fill up and preempt."""

    async def schedule() -> None:
        subject, done = await experienced(**config), samples(**SETTINGS)
        for version, (submitted, polled, update) in enumerate(rounds, 1):
            for sample in [each for each in done if each.finish is None][:submitted]:
                subject.submit(sample)
            for _ in range(polled):
                append(done, await subject.poll())
            append(done, await subject.interrupt())
            if update:
                await subject.update_weights(version)
        await run(subject, [sample for sample in done if sample.finish is None])
        assert responses(done) == UNDRAFTED
        for sample, plain in zip(done, PLAIN, strict=True):
            np.testing.assert_allclose(sample.logprobs, plain.logprobs, rtol=0, atol=1e-5)

    asyncio.run(schedule())


async def test_keep_goes_on_with_the_old_keys_and_values() -> None:
    """As without drafts: what follows an update is drawn by the new weights, on what the old ones left in the cache."""
    policy = copy.deepcopy(POLICY)
    subject = EmbeddedEngine(policy, kv_cache_bytes=1 << 25, max_num_seqs=9, on_update="keep", draft_tokens=8)
    for seed in (7, 8):
        await run(subject, samples(**SETTINGS, seed=seed))
    done = samples(**SETTINGS)
    for sample in done:
        subject.submit(sample)
    while min(sample.length for sample in done) < 10:
        append(done, await subject.poll())
    append(done, await subject.interrupt())
    lengths = {sample.id: sample.length for sample in done}
    old = copy.deepcopy(policy)
    perturb(policy, 1)
    await subject.update_weights(1)
    unfinished = [sample for sample in done if sample.finish is None]
    before = drafted_passes(subject)
    await run(subject, unfinished)
    assert drafted_passes(subject) > before
    assert unfinished
    for sample in unfinished:
        cut = lengths[sample.id]
        assert sample.versions.tolist() == [0] * cut + [1] * (sample.length - cut)
        cache = cached(old, sample, len(sample.prompt_ids) + cut - 1)
        expected = torch.cat((reference(old, sample)[:cut], continuation(policy, sample, cache)))
        assert (expected - torch.from_numpy(sample.logprobs)).abs().max() < 1e-4


def drafted_passes(subject: EmbeddedEngine) -> int:
    return sum(subject._drafter._costs._tried.values())


def rollouts(subject: EmbeddedEngine, target: int, journal: Journal | None = None) -> RolloutScheduler:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return float(sample.length)

    return RolloutScheduler(
        subject,
        Counted(),
        score,
        RolloutParams(rollout_batch_size=2, n_samples_per_prompt=3, over_sampling_batch_size=target),
        sampling=SamplingParams(**SETTINGS),
        journal=journal,
    )


async def trained(scheduler: RolloutScheduler, steps: int) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    async with scheduler:
        for _ in range(steps):
            found |= {each.id: each for group in (await scheduler.collect()).groups for each in group.samples}
            await scheduler.update_weights()
    return found


@settings(max_examples=3, deadline=None)
@given(
    where=st.floats(0, 1),
    target=st.integers(2, 5),
    max_num_seqs=st.integers(2, 9),
    kv_cache_bytes=st.sampled_from([1 << 25, 400_000, 220_000]),
    on_update=st.sampled_from(["keep", "recompute"]),
)
def test_a_run_that_dies_goes_on_with_its_journal(where: float, target: int, **config: Any) -> None:
    """It drafts before and after; what it trains on is what a synchronous run without drafts trains on."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        with closing(Journal(path, flush_seconds=0)) as journal:
            asyncio.run(trained(rollouts(engine(draft_tokens=8, **config), target, journal), 2))
        records = [0, *numbers(path)]
        cut(path, records[round(where * (len(records) - 1))])
        with closing(Journal(path, flush_seconds=0)) as journal:
            journal.seek(None)
            subject = engine(draft_tokens=8, **config)
            found = asyncio.run(trained(rollouts(subject, target, journal), 4))
    assert drafted_passes(subject)
    assert len(found) == 24
    for id, sample in found.items():
        assert sample.response_ids == UNDISTURBED[id].response_ids
        np.testing.assert_allclose(sample.logprobs, UNDISTURBED[id].logprobs, rtol=0, atol=1e-5)


UNDISTURBED = asyncio.run(trained(rollouts(engine(), 2), 8))


async def test_a_stop_token_inside_a_draft_ends_the_response() -> None:
    text = next(iter(UNDRAFTED.values()))
    stop = text[len(text) // 2]
    stopped = {**SETTINGS, "stop_token_ids": (stop,)}
    plain, drafted = samples(**stopped), samples(**stopped)
    await run(engine(), plain)
    await run(await experienced(), drafted)
    assert responses(drafted) == responses(plain)
    assert [each.finish for each in drafted] == [each.finish for each in plain]


def test_a_draft_of_fewer_than_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_tokens = -1"):
        engine(draft_tokens=-1)


def test_what_a_drafted_token_costs_is_learned_for_each_size_of_batch() -> None:
    """2 ms and 0.05 ms a sequence; a drafted token takes 0.08 ms in batches of 32 and nothing in batches of 2."""
    costs = PassCosts()
    assert not costs.try_drafts(32), "nothing is known of passes without drafts yet"
    went_without = 0
    for i in range(300):
        for decoding, extra in ((32, 80e-6), (2, 0.0)):
            tries = costs.try_drafts(decoding)
            went_without += not tries
            drafted = 10 + i % 20 if tries else 0
            costs.observe(decoding, drafted, 2e-3 + 50e-6 * decoding + (drafted > 0) * 5e-4 + extra * drafted)
    assert 30 < went_without < 60
    assert costs.plain(16) == pytest.approx(2.8e-3)
    assert costs.token(32) == pytest.approx(80e-6, rel=0.01)
    assert costs.drafts(32, 20) == pytest.approx(5e-4 + 20 * 80e-6, rel=0.01)
    assert costs.token(2) == pytest.approx(50e-6), "never less than a sequence more"
    for _ in range(4000):
        costs.observe(32, 0, 3.6e-3)
    assert costs.drafts(32, 20) < 1e-3, "what was dear is tried again"


async def test_drafts_that_do_not_pay_are_not_made() -> None:
    """A pass takes 2 ms, and 5 ms for each drafted token, whatever it decodes."""
    subject = await experienced(max_num_seqs=9)
    drafter: Any = subject._drafter
    drafter._costs = PassCosts()
    observe, drafted, looked_for = drafter._costs.observe, [], []
    propose = Past.propose

    def counted(past: Past, *asked: Any) -> tuple[int, list[int]]:
        looked_for.append(past)
        return propose(past, *asked)

    def dear(decoding: int, tokens: int, seconds: float) -> None:
        drafted.append(tokens)
        observe(decoding, tokens, 2e-3 + 5e-3 * tokens)

    drafter._costs.observe = dear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.engines.embedded.drafts.WORTH", 1.5)
        patch.setattr(Past, "propose", counted)
        for _ in range(6):
            looked_for.clear()
            done = samples(**SETTINGS)
            await run(subject, done)
            assert responses(done) == UNDRAFTED
    assert sum(map(bool, drafted)) < 0.15 * len(drafted)
    assert len(looked_for) < 0.1 * sum(sample.length for sample in done), "nor looked for, once that is known"


def test_in_large_batches_drafts_that_did_not_pay_are_looked_for_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.engines.embedded.drafts.WORTH", 1.5)
    costs = PassCosts()
    for i in range(40):
        for decoding in (1, 128):
            costs.observe(decoding, 8 * (i % 2), 4e-3 if i % 2 else 2e-3)

    def looked_for(decoding: int) -> int:
        """Of a thousand passes."""
        count = 0
        for _ in range(1000):
            if costs.try_drafts(decoding):
                count += 1
                assert not costs.paid(decoding, 8, expected=0.5)
        return count

    assert 10 < looked_for(128) < 25
    assert looked_for(1) > 900, "where looking takes nothing"
    while not costs.try_drafts(128):
        pass
    assert costs.paid(128, 8, expected=300.0), "as soon as they are expected to bring enough, they are made"
    assert not costs.paid(128, 8, expected=0.5)
    assert sum(costs.try_drafts(128) for _ in range(100)) > 85, "and pauses are short again"


def test_a_large_batch_on_trial_drafts_for_a_few() -> None:
    costs = PassCosts()
    costs.observe(128, 0, 1e-2)
    asked = []
    while costs.on_trial(128):
        asked.append(costs.trial(128, 8))
        costs.observe(128, asked[-1], 2e-2)
    assert len(set(asked)) > 2, "a line's slope needs different numbers"
    assert max(asked) <= 128 / 8


async def test_a_pass_on_trial_that_prefills_besides_drafts_nothing() -> None:
    """It would say nothing about what drafts take."""
    subject = await experienced(max_num_seqs=3)
    drafter: Any = subject._drafter
    drafter._costs.on_trial = lambda decoding: True
    draft, prefilled = drafter.draft, []

    def watched(decoding: list[Any], prefilling: int, most: int) -> None:
        draft(decoding, prefilling, most)
        if prefilling and decoding:
            prefilled.append(prefilling)
            assert not any(sequence.draft for sequence in decoding)

    drafter.draft = watched
    await run(subject, samples(**SETTINGS))
    assert prefilled


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's time passes while the processor waits")
async def test_what_other_programs_do_is_not_taken_for_what_a_pass_costs() -> None:
    subject = engine(draft_tokens=8)
    model: Any = subject._model
    logits = model.logits

    def waiting(*asked: Any) -> Any:
        time.sleep(0.2)
        return logits(*asked)

    model.logits = waiting
    await run(subject, samples(max_tokens=4))
    assert 0 < subject._drafter._costs.plain(8) < 0.1
