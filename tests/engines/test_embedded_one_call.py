"""A forward pass of the embedded engine on a GPU: one call of attention per layer, and one wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from april.engines import kernels
from april.engines.embedded import EmbeddedEngine, forward_pass
from april.engines.embedded.attention import IMPLEMENTATION
from april.engines.embedded.forward_pass import ForwardPass
from april.engines.embedded.kv_cache import KVCache
from april.engines.embedded.kv_shape import KVShape
from april.engines.embedded.sampling import sample as draw_tokens
from april.engines.embedded.sequence import Sequence
from april.engines.kernels import Bounds, attend, causal_mask, varlen_kernel
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample
from tests.engines.architectures import append, assert_behaviour, model, responses, run, samples

CALLS: list[tuple[int, ...]] = []


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """What a kernel for packed sequences computes, one sequence after the other."""
    assert bounds.used is not None
    CALLS.append(tuple(query.shape))
    firsts, begins, parts = bounds.queries.tolist(), bounds.keys.tolist(), []
    for first, last, begin, count in zip(firsts, firsts[1:], begins, bounds.used.tolist(), strict=False):
        assert 0 < last - first <= bounds.longest_query
        assert count <= bounds.longest_key
        positions = torch.arange(count - (last - first), count)[None]
        mask = causal_mask(positions, count, window, query.dtype)
        tensors = (query[first:last], key[begin : begin + count], value[begin : begin + count])
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in tensors)
        parts.append(attend(q, k, v, mask, scaling, softcap)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    varlen_kernel.cache_clear()
    monkeypatch.setattr(kernels, "torch_varlen", lambda: exact)
    CALLS.clear()
    yield
    varlen_kernel.cache_clear()


def engine(architecture: str, **config: Any) -> EmbeddedEngine:
    settings = {"kv_cache_bytes": 1 << 24, "max_num_seqs": 5, "prefill_chunk": 7, **config}
    return EmbeddedEngine(model(architecture), **settings)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral-window", "gemma2"])
async def test_one_call_for_all_buckets_samples_the_same_tokens(architecture: str, one_call: None) -> None:
    """Sequences that decode in several buckets, prefill in chunks and resume."""
    done = samples(max_tokens=52, temperature=1.3)
    subject = engine(architecture)
    await run(subject, done)
    assert_behaviour(model(architecture), done)
    assert {shape[1:] for shape in CALLS} == {(2, 8)}, "each KV head's two query heads"


async def test_interrupts_and_a_tight_cache_change_no_token_of_one_call(one_call: None) -> None:
    expected = responses(await run(engine("qwen3"), samples()))
    varlen_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_pass, "varlen_kernel", lambda case: None)
        assert responses(await run(engine("qwen3"), samples())) == expected
    subject, done = engine("qwen3", kv_cache_bytes=110_000), samples()
    while unfinished := [each for each in done if each.finish is None]:
        for each in unfinished:
            subject.submit(each)
        for _ in range(9):
            append(done, await subject.poll())
        append(done, await subject.interrupt())
    assert responses(done) == expected


FREE = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
"""Operators that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts operators that compute something on the device, and copies that wait for it.

    The device is PyTorch's `meta`: its tensors hold no data, and to read one of them raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs, out)) if torch.is_tensor(each)]
        devices = {each.device.type for each in tensors}
        if "meta" in devices and not func.is_view and not any(each in str(func) for each in FREE):
            self.counted[str(func)] += 1
            if "cpu" in devices and "copy" in str(func) and not (kwargs or {}).get("non_blocking"):
                self.waits.append(str(func))
        return out


LAYERS, BUCKETS = 28, 9


def counted_pass(buckets: int, patch: pytest.MonkeyPatch, params: SamplingParams, prefill: bool = False) -> Launches:
    """One pass of Qwen3-0.6B's layers over sequences that decode in `buckets` buckets, on a device without data."""
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(forward_pass, "varlen_kernel", lambda case: kernels.torch_varlen())
    device = torch.device("meta")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    config = transformers.Qwen3Config(
        vocab_size=4096, intermediate_size=64, num_hidden_layers=LAYERS, max_position_embeddings=2048, **shape
    )
    with torch.no_grad(), device:  # inference mode would hide copies behind `reshape` and `to`
        policy = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
        policy.set_attn_implementation(IMPLEMENTATION)
        cache: KVCache[Sequence] = KVCache(KVShape(LAYERS, 2, 16, 16), 1024, 1 << 28, torch.bfloat16, device)
        for number, bucket in enumerate(cache.buckets[:buckets]):
            cache.place(sequence := of_length(number, bucket.length - 1), bucket)
            sequence.kv_length = bucket.length - 2
            bucket.start_decoding(sequence)
        chunks = []
        if prefill:
            cache.place(sequence := of_length(buckets, 40), cache.buckets[0])
            chunks = [(sequence, 40)]
        with Launches() as launches:
            step = ForwardPass(cache, chunks, device)
            rows = 0 if step.sampled is None else step.sampled
            logits = policy(
                input_ids=step.tokens,
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=rows,
                april_attention=step,
            ).logits[0]
            count = len(step.sequences)
            with pytest.raises(NotImplementedError, match="out of meta tensor") as waits:
                draw_tokens(logits[:count], [params] * count, [0.5] * count)
            assert any("drawn.tolist()" in str(entry.statement) for entry in waits.traceback)
    return launches


def of_length(number: int, length: int) -> Sequence:
    sample = Sample(0, number, tuple(range(1, length + 1)), SamplingParams(max_tokens=1000), number)
    return Sequence.of(sample, [*sample.prompt_ids], 1024, frozenset())


def test_a_copy_that_waits_is_found() -> None:
    with Launches() as launches:
        torch.zeros(1).to("meta")
        torch.zeros(1).to("meta", non_blocking=True)
    assert len(launches.waits) == 1


def test_the_number_of_buckets_adds_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    one, nine = (counted_pass(buckets, monkeypatch, SamplingParams()) for buckets in (1, BUCKETS))
    assert nine.counted == one.counted
    assert one.counted["torch_attn._varlen_attn.default"] == LAYERS
    assert one.counted["aten.index_copy_.default"] == 2 * LAYERS
    assert one.counted.total() < 1796


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)])
def test_the_host_waits_for_the_device_once_a_pass(
    params: SamplingParams, prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = counted_pass(3, monkeypatch, params, prefill)
    assert launches.waits == []
    assert launches.counted["torch_attn._varlen_attn.default"] == LAYERS
