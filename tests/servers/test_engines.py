"""vLLM and SGLang as engines: each test runs on both real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from april.engines.servers.broadcast import Broadcast
from april.engines.servers.server import ServerEngine
from april.rollout.engine import Chunk, Engine, EngineError, KVPolicy
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from tests.servers.conftest import CONTEXT, SLOTS, Connect, Kind, make_samples
from tests.servers.tiny import VOCABULARY, Oracle

pytestmark = pytest.mark.usefixtures("agrees_with_the_server")

EXACT = 1e-4
"""Largest difference of log-probabilities between a server and Hugging Face, both in float32."""


def absorb(chunks: Iterable[Chunk], samples: Sequence[Sample]) -> list[str]:
    """Append chunks to their samples, as the scheduler does; returns the errors among them."""
    by_id = {sample.id: sample for sample in samples}
    errors = []
    for chunk in chunks:
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if chunk.error is not None:
            errors.append(chunk.error)
    return errors


def submit(engine: Engine, samples: Iterable[Sample]) -> None:
    """Submit new and unfinished samples."""
    for sample in samples:
        if sample.finish is None:
            engine.submit(sample)


async def advance(engine: Engine, samples: Sequence[Sample]) -> None:
    """Poll once for new tokens; at least one sample must be unfinished."""
    assert any(sample.finish is None for sample in samples), "every sample has finished: nothing more will come"
    assert not absorb(await engine.poll(), samples)


async def finish(engine: Engine, samples: Sequence[Sample]) -> None:
    """Run samples that are in flight to their ends."""
    while any(sample.finish is None for sample in samples):
        await advance(engine, samples)


async def reach(engine: Engine, samples: Sequence[Sample], tokens: int) -> None:
    """Run samples that are in flight until one has `tokens` tokens."""
    while max(sample.length for sample in samples) < tokens:
        await advance(engine, samples)


def error_by_version(sample: Sample, oracles: Sequence[Oracle]) -> float:
    """Largest difference of a token's log-probability from the forward pass of the version that sampled it."""
    if not sample.length:
        return 0.0
    errors = []
    for slack in (0.0, -EXACT, EXACT):
        by_version = np.stack([oracle.logprobs(sample, slack) for oracle in oracles])
        errors.append(np.abs(by_version[sample.versions, np.arange(sample.length)] - sample.logprobs))
    return float(np.min(errors, axis=0).max())


SETTINGS = [
    SamplingParams(24),
    SamplingParams(24, temperature=0.6),
    SamplingParams(24, temperature=0),
    SamplingParams(24, temperature=0.8, top_k=5),
    SamplingParams(24, temperature=0.9, top_k=40, top_p=0.6),
    SamplingParams(24, temperature=1.0, top_k=100, min_p=0.1),
    SamplingParams(24, temperature=0.7, top_p=0.5),
    SamplingParams(24, top_k=64, top_p=0.8, min_p=0.02),
    SamplingParams(24, temperature=0, top_k=3, top_p=0.5),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
async def test_logprobs_belong_to_the_sampled_distribution(
    engine: ServerEngine, oracles: list[Oracle], sampling: SamplingParams
) -> None:
    samples = make_samples(4, sampling)
    submit(engine, samples)
    await finish(engine, samples)
    for sample in samples:
        assert sample.length == 24
        assert sample.finish is FinishReason.LENGTH
        assert set(sample.versions) == {0}
        assert error_by_version(sample, oracles) < EXACT


async def test_different_settings_share_a_batch(engine: ServerEngine, oracles: list[Oracle]) -> None:
    samples = [Group.start(i, Prompt((5, 6, 10 + i)), 1, sampling, 0).samples[0] for i, sampling in enumerate(SETTINGS)]
    submit(engine, samples)
    await finish(engine, samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_a_stop_token_ends_the_response_and_is_its_last(engine: ServerEngine) -> None:
    (greedy,) = make_samples(1, SamplingParams(16, temperature=0))
    engine.submit(greedy)
    await finish(engine, [greedy])
    stop = greedy.response_ids[5]
    first = greedy.response_ids.index(stop)
    (stopped,) = make_samples(1, SamplingParams(16, temperature=0, stop_token_ids=(stop,)))
    engine.submit(stopped)
    await finish(engine, [stopped])
    assert stopped.finish is FinishReason.STOP
    assert stopped.response_ids == greedy.response_ids[: first + 1]


@pytest.mark.parametrize("stop_token_ids", [(), (3,)])
async def test_the_models_own_end_token_does_not_end_a_response(
    engine: ServerEngine, oracles: list[Oracle], stop_token_ids: tuple[int, ...]
) -> None:
    # A sample that may stop draws the model's end token before its own in about half of the cases: one of many does.
    count = 16 * SLOTS if stop_token_ids else SLOTS
    samples = make_samples(count, SamplingParams(300, temperature=2.0, stop_token_ids=stop_token_ids))
    submit(engine, samples)
    await finish(engine, samples)
    assert any(1 in sample.response_ids[:-1] for sample in samples)
    for sample in samples:
        stopped = sample.response_ids[-1] in stop_token_ids
        assert sample.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or sample.length == 300
        assert not any(token in stop_token_ids for token in sample.response_ids[:-1])
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_abort_returns_everything_sampled_by_running_and_queued_requests(
    connect: Connect, oracles: list[Oracle]
) -> None:
    engine = await connect(stream_interval=8)  # what the server has not sent yet comes with the abort
    samples = make_samples(5 * SLOTS, SamplingParams(120))
    submit(engine, samples)
    assert engine.running == SLOTS
    await reach(engine, samples, 20)
    absorb(await engine.interrupt(), samples)
    assert engine.running == 0
    assert await engine.poll() == []
    # That no sampled token is missing is the server's word: see `agrees_with_the_server`.
    assert sum(0 < sample.length < 120 for sample in samples) >= SLOTS
    assert any(sample.length == 0 for sample in samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    submit(engine, samples)
    await finish(engine, samples)
    assert all(sample.length == 120 for sample in samples)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_stopping_samples_by_name_leaves_other_samples_unchanged(
    connect: Connect, oracles: list[Oracle], on_update: KVPolicy
) -> None:
    engine = await connect(on_update=on_update)
    samples = make_samples(SLOTS + 4, SamplingParams(200))
    submit(engine, samples)
    await reach(engine, samples, 20)
    for turn in range(3):
        chosen = [sample for sample in samples[turn::3] if sample.finish is None]
        others = [sample for sample in samples if sample not in chosen]
        poll = asyncio.create_task(engine.poll())
        interrupted = await engine.interrupt([sample.id for sample in chosen])
        if poll.done():
            assert not absorb(poll.result(), samples)
        assert not absorb(interrupted, chosen)
        if not poll.done():
            assert not absorb(await poll, others)
        assert not absorb(await engine.poll(), others)
        submit(engine, chosen)
    await finish(engine, samples)
    assert all(sample.length == 200 for sample in samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_interrupt_right_after_submit(engine: ServerEngine) -> None:
    samples = make_samples(2 * SLOTS, SamplingParams(100))
    for turn in range(4):
        submit(engine, samples)
        for _ in range(turn):
            await asyncio.sleep(0)
        absorb(await engine.interrupt(), samples)
        assert await engine.poll() == []
    submit(engine, samples)  # a server may be done with some before it has heard of an interrupt
    await finish(engine, samples)
    assert all(sample.length == 100 for sample in samples)


async def test_each_token_matches_its_version_after_a_resume_under_new_weights(
    engine: ServerEngine, oracles: list[Oracle], models: list[Path]
) -> None:
    samples = make_samples(SLOTS + 4, SamplingParams(160, temperature=0.8))
    for version in range(3):
        if version:
            await engine.update_weights(version, models[version])
        submit(engine, samples)
        if version < 2:
            while sum(int((sample.versions == version).sum()) for sample in samples) < 100:
                await advance(engine, samples)
            absorb(await engine.interrupt(), samples)
    await finish(engine, samples)
    assert {0, 1, 2} == {version for sample in samples for version in sample.versions}
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    # Were the versions mixed up, it would show.
    swapped = [oracles[1], oracles[2], oracles[0]]
    assert min(error_by_version(sample, swapped) for sample in samples) > 0.1


async def test_recompute_finds_no_stale_prefix(engine: ServerEngine, oracles: list[Oracle], models: list[Path]) -> None:
    prompt = tuple(range(2, 130))
    for version in (0, 1):
        samples = make_samples(4, SamplingParams(8), prompt=prompt)
        await engine.update_weights(version, models[version])
        submit(engine, samples)
        await finish(engine, samples)
        assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_keep_continues_with_the_old_kv_cache(
    connect: Connect, oracles: list[Oracle], models: list[Path]
) -> None:
    engine = await connect(on_update="keep")
    samples = make_samples(SLOTS + 4, SamplingParams(240))
    submit(engine, samples)
    while not any(sample.finish is None and sample.length > 40 for sample in samples):  # a server's first are slow
        await advance(engine, samples)
    absorb(await engine.interrupt(), samples)
    assert await engine.poll() == []
    assert any(sample.finish is None and sample.length > 40 for sample in samples)
    before = [sample.length for sample in samples]
    await engine.update_weights(1, models[1])
    fresh = make_samples(2, SamplingParams(20), first=100)
    submit(engine, [*samples, *fresh])
    await finish(engine, [*samples, *fresh])
    for sample, known in zip(samples, before, strict=True):
        assert sample.length == 240
        # What the server had sampled before it stopped may arrive after the interrupt: it is of the old version.
        length = int((sample.versions == 0).sum())
        assert known <= length
        assert (sample.versions == np.repeat([0, 1], [length, 240 - length])).all()
        old, new = oracles[0].logprobs(sample), oracles[1].logprobs(sample)
        assert np.abs(old[:length] - sample.logprobs[:length]).max(initial=0) < EXACT
        if 40 < length < 200:
            # Neither policy alone: new weights over the old policy's keys and values.
            assert np.abs(new[length:] - sample.logprobs[length:]).max() > 0.01
            assert np.abs(old[length:] - sample.logprobs[length:]).max() > 0.01
    # A sample that starts now meets no old key or value, though its prompt was seen under the old weights.
    assert max(error_by_version(sample, oracles) for sample in fresh) < EXACT


async def test_keep_an_unresumed_frozen_sample_loses_no_token(connect: Connect, models: list[Path]) -> None:
    engine = await connect(on_update="keep")
    samples = make_samples(4, SamplingParams(400))
    submit(engine, samples)
    while not all(sample.length for sample in samples):
        await advance(engine, samples)
    absorb(await engine.interrupt(), samples)
    await engine.update_weights(1, models[1])
    submit(engine, samples[:2])
    await finish(engine, samples[:2])
    left = [sample.length for sample in samples[2:]]
    engine.forget(sample.id for sample in samples[2:3])
    submit(engine, samples[2:])
    await finish(engine, samples[2:])
    assert all(sample.length == 400 for sample in samples)
    for sample, length in zip(samples[2:], left, strict=True):
        # Tokens sampled before the update may arrive after the interrupt; no old token follows a new one.
        assert sorted(sample.versions) == list(sample.versions)
        assert set(sample.versions[:length]) == {0}
        assert set(sample.versions) in ({0, 1}, {0}), "the server may have been done with it before the update"
    assert set(samples[2].versions[left[0] :]) == {1}, "what was forgotten is never handed out"


async def test_keep_a_new_sample_with_a_forgotten_id_gets_none_of_the_old_tokens(
    connect: Connect, oracles: list[Oracle]
) -> None:
    engine = await connect(on_update="keep")
    for _ in range(5):
        samples = make_samples(SLOTS, SamplingParams(200))
        submit(engine, samples)
        await reach(engine, samples, 5)
        absorb(await engine.interrupt(), samples)
        engine.forget()
    others = make_samples(SLOTS, SamplingParams(20), prompt=(8, 9))
    submit(engine, others)
    await finish(engine, others)
    assert max(error_by_version(sample, oracles) for sample in others) < EXACT


async def test_keep_drops_no_token_at_a_resume(connect: Connect, oracles: list[Oracle], models: list[Path]) -> None:
    """Without an update, and after an update to the same weights, old keys and values equal the new weights': every
    token is exact, also the first token after a resume. vLLM could drop that token (its issue 42043)."""
    engine = await connect(on_update="keep")
    samples = make_samples(SLOTS + 4, SamplingParams(120))
    for version, tokens in enumerate((20, 50, 90)):
        submit(engine, samples)
        await reach(engine, samples, tokens)
        absorb(await engine.interrupt(), samples)
        if version:
            await engine.update_weights(version, models[0])
    submit(engine, samples)
    await finish(engine, samples)
    assert all(sample.length == 120 for sample in samples)
    assert max(error_by_version(sample, [oracles[0]] * 3) for sample in samples) < EXACT


async def test_requests_that_do_not_fit_are_refused_before_they_are_sent(engine: ServerEngine) -> None:
    def sample(prompt: tuple[int, ...], sampling: SamplingParams) -> Sample:
        return Group.start(7, Prompt(prompt), 1, sampling, 0).samples[0]

    with pytest.raises(ValueError, match=rf"sample 7\.0: token {VOCABULARY} is outside the vocabulary"):
        engine.submit(sample((5, VOCABULARY), SamplingParams(4)))
    with pytest.raises(ValueError, match=r"sample 7\.0: token -1 is outside the vocabulary"):
        engine.submit(sample((5, -1), SamplingParams(4)))
    with pytest.raises(ValueError, match=r"sample 7\.0: token 999 is outside the vocabulary"):
        engine.submit(sample((5, 6), SamplingParams(4, stop_token_ids=(999,))))
    with pytest.raises(ValueError, match=rf"sample 7\.0: a prompt of 2 tokens and a .* budget of {CONTEXT} do not fit"):
        engine.submit(sample((5, 6), SamplingParams(CONTEXT)))
    with pytest.raises(ValueError, match=r"sample 7\.0: the prompt is empty"):
        engine.submit(sample((), SamplingParams(4)))
    assert await engine.poll() == []
    await engine.check()


async def test_a_sample_that_fills_the_context_exactly(engine: ServerEngine) -> None:
    budget = engine.capacity.context_length - 4
    for sample in make_samples(8, SamplingParams(budget)):  # until one is caught before its end by a busy process
        engine.submit(sample)
        await reach(engine, [sample], 1)
        absorb(await engine.interrupt(), [sample])
        if sample.finish is None:
            break
    engine.submit(sample)
    await finish(engine, [sample])
    assert sample.length == budget


async def test_weights_over_a_broadcast_group(engine: ServerEngine, oracles: list[Oracle]) -> None:
    weights: dict[str, Tensor] = {}
    broadcast = Broadcast(lambda: iter(weights.items()), bucket_bytes=2**18)  # several buckets
    samples = make_samples(4, SamplingParams(400))
    for version in range(3):
        weights.update(oracles[version].model.state_dict())
        await engine.update_weights(version, broadcast.offer(version))
        submit(engine, samples)
        if version < 2:
            while not any(version in sample.versions for sample in samples):
                await advance(engine, samples)
            absorb(await engine.interrupt(), samples)
    await finish(engine, samples)
    assert {0, 1, 2} == {version for sample in samples for version in sample.versions}
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    await engine.check()
    assert broadcast.meetings == 1


async def test_missing_weights_are_an_error(engine: ServerEngine, oracles: list[Oracle], tmp_path: Path) -> None:
    for weights in (tmp_path / "nowhere", tmp_path, None):
        with pytest.raises(ValueError, match="must be a directory with safetensors in it"):
            await engine.update_weights(1, weights)
    assert engine.version == 0
    (sample,) = make_samples(1, SamplingParams(16))
    engine.submit(sample)
    await finish(engine, [sample])
    assert error_by_version(sample, oracles) < EXACT


async def test_a_slow_consumer_pauses_the_streams_and_loses_no_token(connect: Connect, oracles: list[Oracle]) -> None:
    engine = await connect(backlog=4)
    samples = make_samples(SLOTS, SamplingParams(250))
    submit(engine, samples)
    await reach(engine, samples, 5)
    await asyncio.sleep(0.5)
    waiting = await engine.poll()
    assert len(waiting) <= 4 + SLOTS
    absorb(waiting, samples)
    await finish(engine, samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_a_cancelled_poll_loses_no_chunk(engine: ServerEngine, oracles: list[Oracle]) -> None:
    samples = make_samples(4, SamplingParams(100))
    submit(engine, samples)
    while any(sample.finish is None for sample in samples):
        poll = asyncio.ensure_future(engine.poll())
        await asyncio.sleep(0)
        poll.cancel()
        await asyncio.wait([poll])
        if not poll.cancelled():
            absorb(poll.result(), samples)
        absorb(await engine.poll(), samples)
    assert all(sample.length == 100 for sample in samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT


async def test_no_server_answers(kind: Kind) -> None:
    with pytest.raises(EngineError, match=r"no .* server answers at http://127\.0\.0\.1:9"):
        await kind.connect("http://127.0.0.1:9")
