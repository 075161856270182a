"""Drafts change how many tokens a pass samples, and never which."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.drafts import PassCosts
from april.rollout.trajectory import Sample
from tests.engines.architectures import append, assert_behaviour, model, responses, run, samples

POLICY = model()
SETTINGS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.4}


@pytest.fixture(autouse=True, scope="module")
def worth_it_whatever_they_cost() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.engines.embedded.drafts.WORTH", 0.0)
        patch.setattr("april.engines.embedded.drafts.FEWEST", 0.0)
        yield


def engine(**config: Any) -> EmbeddedEngine:
    return EmbeddedEngine(POLICY, **{"kv_cache_bytes": 1 << 24, "max_running": 8, **config})


UNDRAFTED = responses(asyncio.run(run(engine(), samples(**SETTINGS))))


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
    drafted = await polls(await experienced(max_running=9), done)
    assert responses(done) == UNDRAFTED
    assert_behaviour(POLICY, done)
    assert drafted < 0.7 * await polls(engine(max_running=9), samples(**SETTINGS))


@settings(max_examples=8, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.booleans()), max_size=3),
    max_running=st.integers(1, 9),
    kv_cache_bytes=st.sampled_from([1 << 24, 200_000, 110_000]),
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
        assert_behaviour(POLICY, done)

    asyncio.run(schedule())


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
    subject = await experienced(max_running=9)
    drafter: Any = subject._drafter
    drafter._costs = PassCosts()
    observe, drafted = drafter._costs.observe, []

    def dear(decoding: int, tokens: int, seconds: float) -> None:
        drafted.append(tokens)
        observe(decoding, tokens, 2e-3 + 5e-3 * tokens)

    drafter._costs.observe = dear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.engines.embedded.drafts.WORTH", 1.5)
        for _ in range(6):
            done = samples(**SETTINGS)
            await run(subject, done)
            assert responses(done) == UNDRAFTED
    assert sum(map(bool, drafted)) < 0.15 * len(drafted)
