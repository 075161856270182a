from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Chunk, FinishReason, Sample, SamplingParams
from april.rollout.batch import Plan, RolloutBatch
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.simulation.blank import Blank, BlankSample
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.replicas import WATERMARK
from april.simulation.run import simulate
from april.simulation.virtual_time import run
from april.simulation.workload import Part, Workload
from tests.engines.interrupts import Moment, finish, moments

WORKLOAD = Workload("test", (Part(30, 0.8),), max_tokens=200, correlation=0.3, prompt_tokens=5)


def cost(**changes: object) -> CostModel:
    defaults: dict[str, object] = {
        "slots": 4,
        "kv_tokens": 4000,
        "decode_batches": (1, 4),
        "decode_seconds": (0.01, 0.013),
        "kv_token_seconds": 1e-5,
        "prefill_token_seconds": 1e-3,
        "prefill_pair_seconds": 1e-6,
        "request_seconds": 1e-3,
    }
    return CostModel(**{**defaults, **changes})  # type: ignore[arg-type]


def samples(count: int, seed: int = 0, group_size: int = 2) -> list[Sample]:
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=WORKLOAD.max_tokens)
    made = []
    for i in range(count):
        group = i // group_size
        prompt = (group, *[0] * (3 + group % 5))
        made.append(BlankSample(group, i % group_size, prompt, sampling, int(rng.integers(2**60))))
    return made


def true_length(sample: Sample) -> int:
    return int(WORKLOAD.lengths(np.array([sample.prompt_ids[0]]), np.array([sample.seed], np.uint64))[0])


def begun(waiting: list[Sample], seed: int) -> list[Sample]:
    """The same samples, about half of them resumed: they have a part of their response from an earlier step."""
    rng = np.random.default_rng(seed)
    for sample in waiting:
        if rng.random() < 0.5 and (had := int(rng.integers(true_length(sample)))):
            sample.extend(Blank(had), Blank(had), 0)
    return waiting


def token_by_token(model: CostModel, waiting: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """When each sample gets its first token on one replica, and its last: the slow and plain account of an engine."""
    base, clock, last_group = model.base(), 0.0, -1
    queue = deque((sample, sample.length) for sample in waiting)
    running: list[tuple[Sample, int]] = []
    first: dict[str, float] = {}
    finished: dict[str, float] = {}
    limit = int(model.kv_tokens * (1 - WATERMARK))

    def held() -> int:
        return sum(len(sample.prompt_ids) + done for sample, done in running)

    while queue or running:
        admitted = 0
        while queue and len(running) < model.slots:
            sample, done = queue[0]
            tokens = len(sample.prompt_ids) + done
            if held() + tokens > limit:
                break
            queue.popleft()
            shared = model.prefix_caching and sample.group_id == last_group
            prefill = max(tokens - len(sample.prompt_ids) * shared, 1)
            last_group = sample.group_id
            clock += model.prefill_token_seconds * prefill + model.request_seconds
            clock += model.prefill_pair_seconds * prefill * (2 * tokens - prefill)
            running.append((sample, done))
            admitted += 1
        if admitted:
            running[-admitted:] = [(sample, done + 1) for sample, done in running[-admitted:]]
            for sample, _ in running[-admitted:]:
                first.setdefault(sample.id, clock)
        else:
            while held() + len(running) > model.kv_tokens:
                queue.appendleft(running.pop())
            clock += base[len(running)] + model.kv_token_seconds * held()
            running = [(sample, done + 1) for sample, done in running]
        for sample, done in running:
            if done == true_length(sample):
                finished[sample.id] = clock
        running = [(sample, done) for sample, done in running if sample.id not in finished]
    return first, finished


async def serve(engine: SimulatedEngine, waiting: list[Sample]) -> dict[str, float]:
    """When each sample finishes."""
    return (await watch(engine, waiting))[1]


async def watch(engine: SimulatedEngine, waiting: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """When each sample gets its first token, and when its last."""
    loop = asyncio.get_running_loop()
    by_id = {sample.id: sample for sample in waiting}
    first: dict[str, float] = {}
    finished = {}
    for sample in waiting:
        engine.submit(sample)
    while len(finished) < len(waiting):
        for chunk in await engine.poll():
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            first.setdefault(chunk.sample_id, loop.time())
            if chunk.finish is not None:
                finished[chunk.sample_id] = loop.time()
    assert await engine.poll() == []
    return first, finished


@given(
    st.integers(1, 30),
    st.integers(0, 100),
    st.integers(1, 4),
    st.sampled_from([230, 300, 600, 4000]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_event_by_event_is_token_by_token(
    count: int, seed: int, slots: int, kv_tokens: int, kv_seconds: float, caching: bool
) -> None:
    """Prefill, decode, a full KV cache and preemption: every new or resumed sample has its first and last token at the
    times of the plain computation."""
    model = cost(slots=slots, kv_tokens=kv_tokens, kv_token_seconds=kv_seconds, prefix_caching=caching)
    served = begun(samples(count, seed), seed)
    expected = token_by_token(model, begun(samples(count, seed), seed))
    for found, when in zip(run(watch(SimulatedEngine(model, WORKLOAD), served)), expected, strict=True):
        assert found == {id: pytest.approx(time) for id, time in when.items()}
    assert [sample.length for sample in served] == [true_length(sample) for sample in served]


@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(0, 50), st.lists(st.floats(0.0, 2.0), max_size=6), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_a_sample_keeps_its_length_and_repeats_no_token_across_interrupts(
    count: int, replicas: int, seed: int, pauses: list[float], keep: bool
) -> None:
    async def main() -> list[Sample]:
        model = cost(kv_tokens=300, interrupt_seconds=0.01, update_seconds=0.1)
        engine = SimulatedEngine(model, WORKLOAD, replicas, "keep" if keep else "recompute")
        waiting = samples(count, seed)
        by_id = {sample.id: sample for sample in waiting}
        for version, pause in enumerate(pauses, 1):
            for sample in waiting:
                if sample.finish is None:
                    engine.submit(sample)
            await asyncio.sleep(pause)
            for chunk in [*(await engine.poll()), *(await engine.interrupt())]:
                by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            assert engine.running == 0
            assert await engine.poll() == []
            await engine.update_weights(version)
        await serve(engine, [sample for sample in waiting if sample.finish is None])
        return waiting

    for sample in run(main()):
        assert sample.length == true_length(sample)
        assert sample.finish is (FinishReason.LENGTH if sample.length == 200 else FinishReason.STOP)


@given(moments(12), st.integers(1, 3), st.sampled_from([240, 300, 4000]), st.sampled_from([None, 0.05]))
@settings(max_examples=100, deadline=None)
def test_samples_stopped_by_name_keep_their_lengths(
    schedule: list[Moment], replicas: int, kv_tokens: int, stream_seconds: float | None
) -> None:
    async def main() -> None:
        engine = SimulatedEngine(cost(kv_tokens=kv_tokens), WORKLOAD, replicas, stream_seconds=stream_seconds)
        await finish(engine, waiting, schedule)

    waiting = samples(12)
    run(main())
    assert [sample.length for sample in waiting] == [true_length(sample) for sample in waiting]


def test_stopping_samples_by_name_frees_slots_at_once_and_delays_no_other_sample() -> None:
    """Four samples decode and one waits; two are stopped. The others are never slower for it."""

    async def main(stopped: int) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        engine = SimulatedEngine(cost(interrupt_seconds=0.0, kv_token_seconds=0.0), WORKLOAD)
        waiting = sorted(samples(40), key=true_length)[-5:]
        for sample in waiting:
            engine.submit(sample)
        assert len(await engine.poll()) == 4, "the first tokens"
        await asyncio.sleep(0.2)
        for chunk in await engine.interrupt([sample.id for sample in waiting[:stopped]]):
            assert len(chunk.token_ids) > 10
        assert engine.running == min(5 - stopped, 4)
        finished: dict[str, float] = {}
        while chunks := await engine.poll():
            finished.update({c.sample_id: loop.time() for c in chunks if c.finish is not None})
        return finished

    alone, shared = run(main(2)), run(main(0))
    assert len(alone) == 3
    assert all(alone[id] < shared[id] for id in alone)


def test_a_cancelled_poll_loses_no_chunk_and_time_continues() -> None:
    async def main(cancel: bool) -> dict[str, float]:
        engine = SimulatedEngine(cost(), WORKLOAD)
        waiting = samples(12)
        for sample in waiting[:8]:
            engine.submit(sample)
        if cancel:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await engine.poll()
        return await rest(engine, waiting)

    async def rest(engine: SimulatedEngine, waiting: list[Sample]) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        for sample in waiting[8:]:
            engine.submit(sample)
        finished: dict[str, float] = {}
        while len(finished) < len(waiting):
            finished.update({c.sample_id: loop.time() for c in await engine.poll() if c.finish is not None})
        return finished

    assert run(main(True)) == {id: pytest.approx(when) for id, when in run(main(False)).items()}


def test_only_recompute_prefills_again() -> None:
    async def main(on_update: str) -> int:
        engine = SimulatedEngine(cost(prefix_caching=False), WORKLOAD, on_update=on_update)  # type: ignore[arg-type]
        sample = next(s for s in samples(50) if true_length(s) > 40)
        engine.submit(sample)
        started = await engine.poll()
        await asyncio.sleep(0.3)
        for chunk in [*started, *(await engine.interrupt())]:
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        assert 10 < sample.length < 40
        before = engine.replicas.prefilled_tokens
        await engine.update_weights(1)
        engine.submit(sample)
        await engine.poll()
        assert engine.replicas.prefilled_tokens - before == (
            1 if on_update == "keep" else len(sample.prompt_ids) + sample.length
        )
        return engine.replicas.prefilled_tokens

    assert run(main("keep")) < run(main("recompute"))


def test_replicas_share_the_load() -> None:
    """Twice the replicas and twice the samples take no longer than the longest response allows."""

    async def main(replicas: int, count: int) -> float:
        engine = SimulatedEngine(cost(), WORKLOAD, replicas)
        return max((await serve(engine, samples(count))).values())

    assert run(main(8, 320)) < 1.5 * run(main(1, 40))
    assert run(main(1, 320)) > 5 * run(main(8, 320))


def test_short_queues_contain_no_sample_of_an_earlier_step() -> None:
    """Queues of different lengths, after a step that had more samples than this one."""

    async def main() -> list[Sample]:
        engine = SimulatedEngine(cost(), WORKLOAD, 4, "keep")
        many = samples(200)
        for sample in many:
            engine.submit(sample)
        await engine.poll()
        await engine.interrupt()
        few = samples(7, seed=1)
        await serve(engine, few)
        return few

    assert [sample.length for sample in run(main())] == [true_length(sample) for sample in samples(7, seed=1)]


def test_a_sample_that_cannot_fit_is_refused() -> None:
    engine = SimulatedEngine(cost(kv_tokens=100), WORKLOAD)
    with pytest.raises(ValueError, match=r"sample 0\.0.*kv_tokens"):
        engine.submit(Sample(0, 0, (1, 2), SamplingParams(max_tokens=100), 1))


@pytest.mark.parametrize("replicas", [1, 4])
def test_same_seed_same_run_to_the_last_bit(replicas: int) -> None:
    def once(seed: int) -> list[object]:
        outcome = simulate(
            WORKLOAD, cost(kv_tokens=300), replicas=replicas, steps=6, warm_up=0, over_sampling_batch_size=64, seed=seed
        )
        return [(s.seconds, s.sampled_tokens, s.staleness.tolist(), s.lengths.tolist()) for s in outcome.steps]

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_resolution_changes_the_times_of_chunks_and_not_the_replicas() -> None:
    async def main(resolution: float) -> dict[str, float]:
        return await serve(SimulatedEngine(cost(), WORKLOAD, 3, resolution=resolution), samples(60))

    exact, coarse = run(main(0.0)), run(main(0.05))
    assert all(exact[id] - 1e-9 <= coarse[id] <= exact[id] + 0.05 + 1e-9 for id in exact)


@pytest.mark.parametrize("drift", [0.3, -0.5])
def test_the_policy_that_ends_a_response_decides_its_length(drift: float) -> None:
    workload = Workload("drifting", (Part(100, 0.0),), max_tokens=400, drift=drift, prompt_tokens=5)

    async def main() -> list[int]:
        engine = SimulatedEngine(cost(), workload)
        waiting = {sample.id: sample for sample in samples(4)}

        def absorb(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                waiting[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)

        for version in (0, 1, 2):
            for sample in waiting.values():
                engine.submit(sample)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.3 if version < 2 else None):  # some twenty decode steps
                    while any(sample.finish is None for sample in waiting.values()):
                        absorb(await engine.poll())
            absorb(await engine.interrupt())
            if version < 2:
                assert all(0 < sample.length < 100 and sample.finish is None for sample in waiting.values())
                await engine.update_weights(version + 1)
        return [sample.length for sample in waiting.values()]

    lengths = run(main())
    if drift > 0:
        assert lengths == [169] * 4  # 100 * 1.3 ** 2
    else:
        assert all(25 < length < 100 for length in lengths), "longer than it would now be: it ends at its next token"


def test_steps_that_take_no_time_have_no_rate() -> None:
    """All responses are equally long, so every second step finds its groups complete."""
    workload = Workload("equal", (Part(30, 1e-9),), max_tokens=200, rollout_batch_size=4, n_samples_per_prompt=1)
    engine = cost(slots=8, decode_batches=(1, 8))
    outcome = simulate(workload, engine, steps=2, warm_up=1, over_sampling_batch_size=8)
    assert outcome.steps[0].seconds > 0
    assert outcome.rollout_seconds == 0
    assert outcome.consumed_tokens_per_second == outcome.generated_tokens_per_second == outcome.occupancy == 0
    group = Group(0, Prompt((0,)), samples(1, group_size=1))
    group.samples[0].extend(Blank(1), Blank(1), 0, FinishReason.STOP)
    assert "consumed_tokens_per_second" not in RolloutBatch(0, Plan(1), [group]).metrics()
