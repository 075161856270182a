"""The embedded engine against plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from april.config.recipe import Recipe
from april.config.settings.engine_settings import EngineSettings
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded import engine as embedded_engine
from april.engines.embedded.kv_cache import KVCache
from april.rollout.engine import EngineError
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import Segment
from april.training.embedded_engine import embedded, embedded_settings
from tests.engines.architectures import (
    DEVICE,
    SUPPORTED,
    VOCABULARY,
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

POLICY = model()


def engine(policy: PreTrainedModel = POLICY, **config: Any) -> EmbeddedEngine:
    return EmbeddedEngine(policy, **{"kv_cache_bytes": 1 << 24, "max_num_seqs": 8, **config})


def uninterrupted(**config: Any) -> list[Sample]:
    return asyncio.run(run(engine(), samples(**config)))


UNINTERRUPTED = responses(uninterrupted())


@pytest.mark.parametrize("architecture", SUPPORTED)
async def test_logprobs_match_a_plain_forward_pass(architecture: str) -> None:
    policy = model(architecture)
    first = engine(policy, max_num_seqs=5, prefill_chunk=7)
    done = samples(max_tokens=52, temperature=1.3)
    for sample in done:
        first.submit(sample)
    for _ in range(17):
        append(done, await first.poll())
    append(done, await first.interrupt())
    await run(first, [sample for sample in done if sample.finish is None])
    assert_behaviour(policy, done)
    again = await run(engine(policy), samples(max_tokens=52, temperature=1.3))
    assert responses(again) == responses(done)


@pytest.mark.parametrize("keep", [True, False])
async def test_interrupted_after_every_token(keep: bool) -> None:
    subject = engine(max_num_seqs=4)
    done = samples()
    while unfinished := [sample for sample in done if sample.finish is None]:
        for sample in unfinished:
            subject.submit(sample)
        append(done, await subject.poll())
        append(done, await subject.interrupt())
        if not keep:
            subject.forget()
    assert responses(done) == UNINTERRUPTED
    assert_behaviour(POLICY, done)


ROUNDS = st.lists(
    st.tuples(
        st.permutations(range(9)),
        st.integers(1, 9),
        st.integers(0, 30),
        st.sampled_from(["resume", "forget", "forget one", "update"]),
    ),
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(
    rounds=ROUNDS,
    max_num_seqs=st.integers(1, 9),
    prefill_chunk=st.integers(1, 40),
    kv_cache_bytes=st.sampled_from([1 << 24, 200_000, 110_000]),
    on_update=st.sampled_from(["keep", "recompute"]),
    stream_interval=st.integers(1, 4),
)
def test_no_schedule_changes_a_token(rounds: list[tuple[list[int], int, int, str]], **config: Any) -> None:
    """Any order and subset of submissions, interrupts, losses of cache, updates to the same weights, any setting."""

    async def schedule() -> None:
        subject, done = engine(**config), samples()
        for version, (order, submitted, polls, then) in enumerate(rounds, 1):
            for sample in [done[i] for i in order[:submitted] if done[i].finish is None]:
                subject.submit(sample)
            for _ in range(polls):
                append(done, await subject.poll())
            append(done, await subject.interrupt())
            match then:
                case "forget":
                    subject.forget()
                case "forget one":
                    subject.forget([done[0].id, "no such sample"])
                case "update":
                    await subject.update_weights(version)
        await run(subject, [sample for sample in done if sample.finish is None])
        assert responses(done) == UNINTERRUPTED
        assert_behaviour(POLICY, done)

    asyncio.run(schedule())


@pytest.mark.parametrize("slots", [1, 3, 8])
async def test_neither_slots_nor_order_nor_company_change_a_token(slots: int) -> None:
    assert responses(await run(engine(max_num_seqs=slots), samples()[::-1])) == UNINTERRUPTED
    alone = samples()[4]
    await run(engine(max_num_seqs=slots), [alone])
    assert alone.response_ids == UNINTERRUPTED[alone.id]


async def test_samples_of_a_group_differ_and_follow_their_seeds() -> None:
    first, second, third = samples(groups=1)
    assert len(set(map(tuple, UNINTERRUPTED.values()))) == len(UNINTERRUPTED)
    second.seed = first.seed
    await run(engine(), [first, second, third])
    assert first.response_ids == second.response_ids != third.response_ids


async def test_mixed_sampling_settings_in_a_batch() -> None:
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0),
        SamplingParams(max_tokens=20, temperature=0.7, top_k=5),
        SamplingParams(max_tokens=20, top_p=0.8, min_p=0.01),
    ]
    alone = [Sample(0, i, (1, 2, 3), p, seed=i) for i, p in enumerate(params)]
    for sample in alone:
        await run(engine(), [sample])
    together = [Sample(0, i, (1, 2, 3), p, seed=i) for i, p in enumerate(params)]
    await run(engine(), together)
    assert responses(together) == responses(alone)
    assert_behaviour(POLICY, together[:2])
    greedy = together[1]
    ids = torch.tensor([[*greedy.prompt_ids, *greedy.response_ids]], device=DEVICE)
    logits = POLICY(input_ids=ids).logits[0]
    assert logits[2:-1].argmax(-1).tolist() == greedy.response_ids


async def test_recompute_after_an_update_is_the_new_policy() -> None:
    policy, subject, done = await interrupted_by_an_update("recompute")
    old, first_lengths = copy.deepcopy(policy), {sample.id: sample.length for sample in done}
    perturb(policy, 1)
    await subject.update_weights(1)
    await run(subject, [sample for sample in done if sample.finish is None])
    for sample in done:
        cut = first_lengths[sample.id]
        assert sample.versions.tolist() == [0] * cut + [1] * (sample.length - cut)
        expected = torch.cat((reference(old, sample)[:cut], reference(policy, sample)[cut:]))
        assert (expected - torch.from_numpy(sample.logprobs)).abs().max() < 1e-4
        assert (reference(old, sample) - reference(policy, sample)).abs().max() > 1e-2


async def test_keep_continues_with_the_old_keys_and_values() -> None:
    policy, subject, done = await interrupted_by_an_update("keep")
    old, first_lengths = copy.deepcopy(policy), {sample.id: sample.length for sample in done}
    perturb(policy, 1)
    await subject.update_weights(1)
    # The newcomer shares its prompt with a group whose keys and values are of the old policy: it must not use them.
    newcomer = Sample(9, 0, done[0].prompt_ids, done[0].sampling, seed=99)
    await run(subject, [*(sample for sample in done if sample.finish is None), newcomer])
    assert_behaviour(policy, [newcomer])
    for sample in done:
        cut = first_lengths[sample.id]
        cache = cached(old, sample, len(sample.prompt_ids) + cut - 1)
        expected = torch.cat((reference(old, sample)[:cut], continuation(policy, sample, cache)))
        assert (expected - torch.from_numpy(sample.logprobs)).abs().max() < 1e-4
        assert (reference(policy, sample)[cut:] - torch.from_numpy(sample.logprobs)[cut:]).abs().max() > 1e-2


async def interrupted_by_an_update(on_update: Any) -> tuple[PreTrainedModel, EmbeddedEngine, list[Sample]]:
    policy = model()
    subject = engine(policy, on_update=on_update, max_num_seqs=16)
    done = samples(max_tokens=40)
    for sample in done:
        subject.submit(sample)
    while min(sample.length for sample in done) < 10:
        append(done, await subject.poll())
    append(done, await subject.interrupt())
    return policy, subject, done


@pytest.mark.parametrize("dtype", [None, torch.float64])
async def test_sent_weights_are_used(dtype: torch.dtype | None) -> None:
    policy, other = model(), model(seed=5)
    subject = engine(policy, dtype=dtype)
    await subject.update_weights(1, other.state_dict())
    done = await run(subject, samples())
    assert_behaviour(other, done)
    assert {version for sample in done for version in sample.versions} == {1}
    with pytest.raises(KeyError, match="no parameter named 'nonsense'"):
        await subject.update_weights(2, [("nonsense", torch.zeros(1))])


async def test_a_copy_in_a_different_type_follows_the_model() -> None:
    policy = model()
    subject = engine(policy, dtype=torch.float64)
    perturb(policy, 3)
    await subject.update_weights(1)
    assert_behaviour(policy, await run(subject, samples()))
    assert next(policy.parameters()).dtype == torch.float32


async def test_a_group_is_prefilled_once() -> None:
    policy = copy.deepcopy(POLICY)
    forwarded: list[int] = []
    policy.register_forward_pre_hook(
        lambda module, args, given: forwarded.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    subject = engine(policy, max_num_seqs=16)
    forwarded.clear()
    done = await run(subject, samples(groups=2, size=8, max_tokens=1, prompt=40))
    # Each prompt once, and its last token again for each of the group's other samples.
    assert sum(forwarded) == 40 + 45 + 2 * 7 + sum(sample.length - 1 for sample in done)
    unshared = samples(groups=2, size=8, max_tokens=1, prompt=40)
    for sample in unshared:
        await run(engine(), [sample])
    assert responses(unshared) == responses(done)


async def test_a_long_prompt_does_not_stall_decoding_samples() -> None:
    subject = engine(prefill_chunk=8)
    short = Sample(0, 0, (1, 2, 3), SamplingParams(max_tokens=100), seed=1)
    long = Sample(1, 0, tuple(i % VOCABULARY for i in range(200)), SamplingParams(max_tokens=3), seed=2)
    subject.submit(short)
    append([short], await subject.poll())
    subject.submit(long)
    while long.length == 0:
        before = short.length
        append([short, long], await subject.poll())
        assert short.length == before + 1
    assert short.length == 26
    assert_behaviour(POLICY, [short, long])


async def test_a_recipe_sets_how_many_tokens_a_pass_prefills() -> None:
    recipe = Recipe(engine=EngineSettings(prefill_chunk=7, kv_cache_gb=0.01))
    assert embedded_settings(recipe, "cpu", None).prefill_chunk == 7
    policy, sizes = copy.deepcopy(POLICY), list[int]()
    policy.register_forward_pre_hook(
        lambda module, args, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    subject = embedded(recipe, policy, beside_trainer=False)
    sizes.clear()
    await run(subject, [Sample(0, 0, tuple(range(1, 21)), SamplingParams(max_tokens=1), seed=1)])  # type: ignore[arg-type]
    assert sizes == [7, 7, 6]


@pytest.mark.parametrize("rows", [1, 2, 3.5])
async def test_a_tiny_budget_preempts_and_stays_exact(rows: float) -> None:
    longest = samples(groups=4, max_tokens=100, size=2)
    free = await run(engine(), longest)
    row_bytes = 3 * 2 * 2 * 8 * 4 * 192
    tight = engine(kv_cache_bytes=int(rows * row_bytes))
    done = samples(groups=4, max_tokens=100, size=2)
    for sample in done:
        tight.submit(sample)
    while chunks := await tight.poll():
        append(done, chunks)
        assert tight.kv_cache_bytes <= int(rows * row_bytes)
    assert responses(done) == responses(free)
    assert_behaviour(POLICY, done)


async def test_paused_samples_are_evicted_oldest_first() -> None:
    row_bytes = 3 * 2 * 2 * 8 * 4 * 64
    subject = engine(kv_cache_bytes=4 * row_bytes, context_length=64)
    paused = [Sample(i, 0, (1 + i, 2, 3), SamplingParams(max_tokens=20), seed=i) for i in range(3)]
    for sample in paused:
        subject.submit(sample)
        append(paused, await subject.poll())
        append(paused, await subject.interrupt())
    others = [Sample(9 + i, 0, (9 + i, 2, 3), SamplingParams(max_tokens=20), seed=i) for i in range(2)]
    await run(subject, others)
    assert list(subject.paused) == ["1.0", "2.0"]
    await run(subject, paused)
    assert_behaviour(POLICY, [*paused, *others])


@pytest.mark.parametrize("passes", [3, 15])
async def test_a_second_engine_continues_with_the_same_tokens_and_close_logprobs(passes: int) -> None:
    """As after a crash: tokens that were decoded one by one are prefilled."""
    whole, done = await run(engine(), samples(max_tokens=24)), samples(max_tokens=24)
    first = engine()
    for sample in done:
        first.submit(sample)
    for _ in range(passes):
        append(done, await first.poll())
    append(done, await first.interrupt())
    lengths = [sample.length for sample in done]
    assert max(lengths) > 0
    await run(engine(), [sample for sample in done if sample.finish is None])
    for expected, found, length in zip(whole, done, lengths, strict=True):
        assert found.response_ids == expected.response_ids
        assert list(found.logprobs[:length]) == list(expected.logprobs[:length])
        assert list(found.logprobs) == pytest.approx(list(expected.logprobs), rel=0, abs=1e-5)


async def test_interrupt_keeps_the_cache_and_forget_releases_it() -> None:
    subject = engine()
    done = samples(groups=1)
    for sample in done:
        subject.submit(sample)
    append(done, await subject.poll())
    append(done, await subject.interrupt())
    assert subject.running == 0
    assert len(subject.paused) == 3
    subject.forget([done[0].id])
    assert len(subject.paused) == 2
    subject.forget()
    assert subject._scheduler.cache.allocated_bytes == 0
    assert await subject.poll() == []


async def test_tokens_added_between_interrupts_are_read() -> None:
    """After an interrupt, a turn continues on the KV cache of the turns before it."""
    subject = engine()
    sample = Sample(0, 0, (1, 2, 3), SamplingParams(max_tokens=30), seed=3)
    subject.submit(sample)
    while sample.length < 8:
        append([sample], await subject.poll())
    append([sample], await subject.interrupt())
    sample.segments.append(Segment(-1, [7, 8, 9, 10], [0.0] * 4))
    sample.length += 4
    await run(subject, [sample])
    expected = reference(POLICY, sample)[sample.loss_mask]
    assert (expected - torch.from_numpy(sample.logprobs[sample.loss_mask])).abs().max() < 1e-4


@pytest.mark.parametrize("at", [2, 6])
async def test_a_cache_of_other_tokens_is_not_used(at: int) -> None:
    subject = engine()
    sample = Sample(0, 0, (1, 2, 3, 4), SamplingParams(max_tokens=30), seed=3)
    subject.submit(sample)
    while sample.length < 8:
        append([sample], await subject.poll())
    await subject.interrupt()
    tokens = [*sample.prompt_ids, *sample.response_ids]
    tokens[at] = (tokens[at] + 1) % VOCABULARY
    other = Sample(0, 0, tuple(tokens[:4]), sample.sampling, seed=4, segments=[Segment(0, tokens[4:], [0.0] * 8)])
    other.length = 8
    await run(subject, [other])
    assert (reference(POLICY, other)[8:] - torch.from_numpy(other.logprobs)[8:]).abs().max() < 1e-4


async def test_stop_tokens_and_lengths_end_a_sample() -> None:
    stop = UNINTERRUPTED["0.0"][5]
    stopped = samples(groups=1, size=1, stop_token_ids=(stop, VOCABULARY + 5))[0]
    await run(engine(), [stopped])
    response = UNINTERRUPTED["0.0"]
    assert stopped.finish is FinishReason.STOP
    assert stopped.response_ids == response[: response.index(stop) + 1]
    truncated = samples(groups=1, size=1)[0]
    await run(engine(context_length=20), [truncated])
    assert truncated.finish is FinishReason.LENGTH
    assert truncated.response_ids == response[:16]


async def test_streaming_in_longer_chunks_hands_out_the_same() -> None:
    subject = engine(stream_interval=8)
    done = samples()
    for sample in done:
        subject.submit(sample)
    polls = 0
    while chunks := await subject.poll():
        polls += 1
        append(done, chunks)
    assert responses(done) == UNINTERRUPTED
    assert polls < 20


async def test_a_cancelled_poll_loses_no_chunk() -> None:
    subject = engine(stream_interval=3)
    done = samples()
    for sample in done:
        subject.submit(sample)
    for turns in range(12):
        poll = asyncio.ensure_future(subject.poll())
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        if poll.done():
            append(done, poll.result())
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)
    while chunks := await subject.poll():
        append(done, chunks)
    assert responses(done) == UNINTERRUPTED


async def test_the_model_is_unchanged() -> None:
    policy = model("qwen3-tied")
    policy.train()
    policy.set_attn_implementation("sdpa")
    before = copy.deepcopy(policy.state_dict())
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    served: set[int] = set()
    seeing = policy.register_forward_hook(lambda module, *_: served.update(p.data_ptr() for p in module.parameters()))
    subject = engine(policy)
    seeing.remove()
    done = await run(subject, samples())
    assert served == own
    assert policy.training
    assert policy.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    ids = torch.tensor([[1, 2, 3]], device=DEVICE)
    policy(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    policy.eval()
    assert_behaviour(policy, done)


async def test_running_and_capacity() -> None:
    subject = engine(max_num_seqs=4, context_length=100)
    assert (subject.capacity.slots, subject.capacity.context_length) == (4, 100)
    assert subject.capacity.kv_tokens == (1 << 24) // (3 * 2 * 2 * 8 * 4)
    for sample in samples():
        subject.submit(sample)
    await subject.poll()
    assert subject.running == 4
    with pytest.raises(EngineError, match="interrupt first"):
        await subject.update_weights(1)
    await subject.close()
    assert subject.running == 0


PARAMS = SamplingParams(max_tokens=30)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(3, 1, (), PARAMS, 0), r"sample 3\.1: the prompt is empty"),
        (Sample(3, 1, (1, VOCABULARY), PARAMS, 0), r"sample 3\.1: token id 61 is outside the vocabulary of 61"),
        (Sample(3, 1, (1, -1), PARAMS, 0), r"sample 3\.1: token id -1 is outside"),
        (Sample(3, 1, (1,) * 100, PARAMS, 0), r"sample 3\.1: 100 tokens fill the context of the engine, 100 tokens"),
        (Sample(3, 1, (1,), PARAMS, 0, finish=FinishReason.STOP), r"sample 3\.1 has finished \(stop\)"),
        (Sample(3, 1, (1,), PARAMS, 0, [Segment(0, [1] * 30, [0.0] * 30)], length=30), r"sample 3\.1: nothing is left"),
        (Sample(3, 1, (1,) * 60, SamplingParams(max_tokens=40), 0), r"sample 3\.1: up to 100 tokens .* kv_cache_bytes"),
    ],
)
async def test_samples_that_do_not_fit_are_refused(sample: Sample, message: str) -> None:
    subject = engine(context_length=100, kv_cache_bytes=3 * 2 * 2 * 8 * 4 * 96)
    with pytest.raises(ValueError, match=message):
        subject.submit(sample)
    assert await subject.poll() == []


async def test_a_sample_in_flight_is_refused() -> None:
    subject = engine()
    sample = Sample(3, 1, (1,), PARAMS, 0)
    subject.submit(sample)
    with pytest.raises(ValueError, match=r"sample 3\.1 is already in flight"):
        subject.submit(sample)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"prefill_chunk": 0}, "prefill_chunk = 0"),
        ({"on_update": "forget"}, "on_update = 'forget'"),
        ({"context_length": 4096}, "context_length = 4096: must be 2 to 512"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes = 1000"),
    ],
)
def test_settings_are_checked(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**config)


def test_the_context_is_no_longer_than_the_cache() -> None:
    row_bytes = 3 * 2 * 2 * 8 * 4 * 128
    assert engine(kv_cache_bytes=row_bytes).capacity.context_length == 128


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("linear", "layer 0 is of type 'linear_attention'"),
        ("ssm", "layer 0 is of type"),
        ("alibi", "called transformers' AttentionInterface"),
        ("sinks", "its attention takes s_aux"),
    ],
)
def test_unsupported_architectures_are_refused(kind: str, message: str) -> None:
    import transformers as hf

    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    make = {
        "linear": lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **shape, **tokens, num_key_value_heads=2, head_dim=8, intermediate_size=48, num_experts=0
            )
        ),
        "ssm": lambda: hf.MambaForCausalLM(hf.MambaConfig(**shape, **tokens)),
        "alibi": lambda: hf.BloomForCausalLM(hf.BloomConfig(**shape, **tokens)),
        "sinks": lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(
                **shape,
                **tokens,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=48,
                num_local_experts=2,
                num_experts_per_tok=1,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        ),
    }[kind]
    with pytest.raises(ValueError, match=message):
        engine(make())


def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="not Linear"):
        engine(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_rotary_embeddings_that_follow_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    policy = model("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match="pass context_length=128"):
        engine(policy)
    assert engine(policy, context_length=128).capacity.context_length == 128


@pytest.mark.parametrize(("where", "fails"), [("model", (3, 20)), ("draw", (3, 20)), ("pools", (4,))])
async def test_a_pass_is_repeated_after_a_memory_shortage(
    where: str, fails: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where keys have moved to a larger pool, and values have not."""
    subject, done, calls = engine(), samples(), []
    targets = {
        "model": (subject._model, "logits"),
        "draw": (embedded_engine, "draw_tokens"),
        "pools": (KVCache, "_pool"),
    }
    target, name = targets[where]
    work = getattr(target, name)

    def short(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) in fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return work(*arguments)

    monkeypatch.setattr(target, name, short)
    before = subject.capacity.kv_tokens
    await run(subject, done)
    assert responses(done) == UNINTERRUPTED
    assert_behaviour(POLICY, done)
    assert before is not None
    assert subject.capacity.kv_tokens == before // 2 ** len(fails)


async def test_repeated_memory_shortage_names_the_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, done = engine(), samples()

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(subject._model, "logits", short)
    with pytest.raises(EngineError, match=r"CUDA out of memory.*lower engine\.kv_cache_gb, engine\.max_num_seqs"):
        await run(subject, done)


async def test_samples_that_name_no_stop_tokens_end_at_the_models() -> None:
    """Of the generation configuration, unless the engine or the sample has its own."""
    policy = model()

    async def drawn(stops: tuple[int, ...] | None = None, **sampling: Any) -> Sample:
        subject = engine(policy, stop_token_ids=stops)
        return (await run(subject, samples(1, 1, max_tokens=12, temperature=0.0, **sampling)))[0]

    whole = (await drawn()).response_ids
    end = whole[5]
    policy.generation_config.eos_token_id = [end]
    assert (await drawn()).response_ids == whole[: whole.index(end) + 1]
    assert (await drawn()).finish is FinishReason.STOP
    assert (await drawn(stops=())).response_ids == whole
    other = next(token for token in range(VOCABULARY) if token not in whole)
    assert (await drawn(stop_token_ids=(other,))).response_ids == whole
