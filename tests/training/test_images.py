"""Training with images: what the engine records is what the trainer computes, through interruptions and updates."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from april import EngineError, Group, SamplingParams
from april.algorithms.batch import Batch
from april.engines.embedded import EmbeddedEngine
from april.images.store import ImageStore
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.training.forward import PolicyModel
from april.training.packing import can_pack, packed_attention
from tests import vision
from tests.images.test_model_inputs import encode, own_inputs

LONG = SamplingParams(24)


@pytest.fixture
def store() -> ImageStore:
    return vision.image_store()


@pytest.fixture
def prompts(store: ImageStore, tmp_path: Path) -> list[Prompt]:
    """Prompts with two images, with one, with an image of the same size and other pixels, and with none."""
    first = vision.picture(tmp_path / "1.png", (40, 24), "blue")
    second = vision.picture(tmp_path / "2.png", mark=8)
    third = vision.picture(tmp_path / "3.png", mark=0)
    return [encode(store, *images, "What is it?") for images in ([first, second], [second], [third], [])]


def samples_of(prompts: list[Prompt], sampling: SamplingParams = LONG, n: int = 2) -> list[Sample]:
    return [s for i, prompt in enumerate(prompts) for s in Group.start(i, prompt, n, sampling, 0).samples]


async def generate(engine: EmbeddedEngine, samples: list[Sample], interrupt: int = 0, update: bool = False) -> None:
    """Generate all samples, interrupting them after every `interrupt` polls."""
    by_id, polls, version = {sample.id: sample for sample in samples}, 0, engine.version
    for sample in samples:
        engine.submit(sample)
    while any(sample.finish is None for sample in samples):
        chunks = await engine.poll()
        polls += 1
        stopped = interrupt and polls % interrupt == 0
        chunks += await engine.interrupt() if stopped else []
        for chunk in chunks:
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if stopped:
            if update:
                version += 1
                await engine.update_weights(version)
            for sample in samples:
                if sample.finish is None:
                    engine.submit(sample)


def scores(policy: Any, store: ImageStore, samples: list[Sample], packed: bool) -> torch.Tensor:
    """Log-probabilities by the trainer, of all sampled tokens in order."""
    batch, scorer = Batch.of(samples, 0), PolicyModel(policy)
    scorer.take_images(store)
    with packed_attention(*[policy] * packed), torch.no_grad():
        return scorer(batch)[0][batch.mask]


def recorded(samples: list[Sample]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(sample.logprobs) for sample in samples])


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
async def test_engine_and_trainer_agree_and_interruptions_change_nothing(
    architecture: str, store: ImageStore, prompts: list[Prompt]
) -> None:
    policy = vision.model(architecture)
    undisturbed, interrupted = samples_of(prompts), samples_of(prompts)
    await generate(EmbeddedEngine(policy, images=store), undisturbed)
    # Prompts are computed in pieces, which end within images.
    engine = EmbeddedEngine(policy, images=store, prefill_chunk=5)
    await generate(engine, interrupted, interrupt=3)
    assert [s.response_ids for s in interrupted] == [s.response_ids for s in undisturbed]
    assert can_pack(policy)
    for samples in (undisturbed, interrupted):
        for packed in (False, True):
            assert (scores(policy, store, samples, packed) - recorded(samples)).abs().max() < 1e-4
    # Samples of two images of the same size, and so of the same token ids, differ.
    assert prompts[1].token_ids == prompts[2].token_ids
    assert undisturbed[2].response_ids != undisturbed[4].response_ids


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_weight_update_computes_images_anew(on_update: Any, store: ImageStore, prompts: list[Prompt]) -> None:
    """With recompute, tokens after an update are those of the newer policy for the whole sequence."""
    policy = vision.model()
    engine = EmbeddedEngine(policy, images=store, on_update=on_update)
    samples = samples_of(prompts, n=1)
    for sample in samples:
        engine.submit(sample)
    by_id = {sample.id: sample for sample in samples}
    for chunk in [*await engine.poll(), *await engine.poll(), *await engine.interrupt()]:
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, 0)
    with torch.no_grad():  # only the part that computes images changes
        for parameter in policy.model.visual.parameters():
            parameter.mul_(1.1)
    await engine.update_weights(1)
    before = [sample.length for sample in samples]
    await generate(engine, samples)
    found = scores(policy, store, samples, False)
    newer = torch.cat([torch.arange(s.length) >= b for s, b in zip(samples, before, strict=True)])
    difference = (found - recorded(samples)).abs()
    with_images = torch.cat([torch.full((s.length,), bool(s.features)) for s in samples])
    assert difference[~with_images].max() < 1e-4
    assert difference[with_images & ~newer].max() > 1e-3
    if on_update == "recompute":
        assert difference[newer].max() < 1e-4
    else:
        assert difference[with_images & newer].max() > 1e-3


async def test_a_sampled_placeholder_is_text(store: ImageStore, prompts: list[Prompt]) -> None:
    policy = vision.model()
    [sample] = samples_of(prompts[:1], n=1)
    sample.extend([vision.PLACEHOLDER, 50], [-1.0, -1.0], 0)
    await generate(EmbeddedEngine(policy, images=store), [sample])
    assert (scores(policy, store, [sample], True) - recorded([sample]))[2:].abs().max() < 1e-4


async def test_a_sample_that_begins_again_with_another_image_uses_no_old_keys(
    store: ImageStore, prompts: list[Prompt]
) -> None:
    """An episode that is restarted keeps its name, and the tokens of an image of the same size."""
    policy = vision.model()
    engine = EmbeddedEngine(policy, images=store, on_update="keep")
    [first], [again], [fresh] = (samples_of([prompt], n=1) for prompt in (prompts[1], prompts[2], prompts[2]))
    engine.submit(first)
    await engine.poll()
    await engine.interrupt()
    assert engine.paused == [first.id] == [again.id]
    await generate(engine, [again])
    await generate(EmbeddedEngine(policy, images=store), [fresh])
    assert again.response_ids == fresh.response_ids
    assert (recorded([again]) - recorded([fresh])).abs().max() < 1e-4


async def test_text_alone_is_computed_as_without_images(store: ImageStore, prompts: list[Prompt]) -> None:
    policy = vision.model()
    with_images, without = samples_of(prompts[3:]), samples_of(prompts[3:])
    await generate(EmbeddedEngine(policy, images=store), with_images)
    await generate(EmbeddedEngine(policy), without)
    assert [s.response_ids for s in with_images] == [s.response_ids for s in without]


async def test_an_image_that_changes_before_it_is_computed_is_named(prompts: list[Prompt], tmp_path: Path) -> None:
    vision.picture(tmp_path / "2.png", colour="green")
    engine = EmbeddedEngine(vision.model(), images=vision.image_store())
    engine.submit(samples_of(prompts[1:2])[0])
    with pytest.raises(EngineError, match=r"2\.png: has changed since its prompt was encoded"):
        await engine.poll()


@pytest.mark.parametrize("interrupted", [False, True])
async def test_other_tasks_run_while_images_are_processed(interrupted: bool, prompts: list[Prompt]) -> None:
    """No image is processed until another task of the event loop has run, which may interrupt the samples."""
    processor, ran = vision.image_processor(), threading.Event()
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def process(**arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert ran.wait(30), "no other task has run"
        return processor(**arguments)

    held = MagicMock(wraps=processor, merge_size=processor.merge_size, side_effect=process)
    engine = EmbeddedEngine(vision.model(), images=ImageStore(held, vision.PLACEHOLDER))
    samples = samples_of(prompts, n=1)
    for sample in samples:
        engine.submit(sample)

    async def other() -> None:
        await begun.wait()
        assert not interrupted or await engine.interrupt() == []
        ran.set()

    chunks, _ = await asyncio.gather(engine.poll(), other())
    assert bool(chunks) is not interrupted
    await engine.interrupt()
    await generate(engine, samples_of(prompts, n=1))
    assert held.call_count == 3  # each image once


async def test_images_that_the_store_does_not_keep_are_processed_for_their_own_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is processed once for the positions of its prompt, and once for its chunk: never in each pass."""
    monkeypatch.setattr("april.images.store.CACHED_BYTES", 1)
    threads, processor = [], vision.image_processor()

    def process(**arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return processor(**arguments)

    counted = MagicMock(wraps=processor, merge_size=processor.merge_size, side_effect=process)
    store = ImageStore(counted, vision.PLACEHOLDER)
    pictures = [vision.picture(tmp_path / f"{number}.png", (40, 24), mark=number) for number in range(6)]
    prompt = encode(store, *pictures, "What is it?")
    engine = EmbeddedEngine(vision.model(), images=store, prefill_chunk=8)
    await generate(engine, samples_of([prompt], n=2))
    assert len(pictures) < len(threads) <= 2 * len(pictures)
    assert threading.main_thread() not in threads, "the event loop continues"


def test_an_engine_without_images_refuses_them(prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match=r"sample 0\.0: its prompt has images, but this engine"):
        EmbeddedEngine(vision.model()).submit(samples_of(prompts[:1])[0])


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
@pytest.mark.parametrize("packed", [False, True])
def test_the_part_that_computes_images_gets_transformers_gradient(
    architecture: str, packed: bool, store: ImageStore, prompts: list[Prompt]
) -> None:
    policy = vision.model(architecture)
    samples = samples_of(prompts[:2], n=1)
    for sample in samples:
        sample.extend([40, 41, 42], [-1.0] * 3, 0)
    batch, scorer = Batch.of(samples, 0), PolicyModel(policy)
    scorer.take_images(store)
    with packed_attention(*[policy] * packed):
        scorer(batch)[0].sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    for sample, prompt in zip(samples, prompts, strict=False):
        more = own_inputs(store, prompt)
        kinds = more.pop("mm_token_type_ids")
        kinds = torch.nn.functional.pad(kinds, (0, sample.length))
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logits = policy(input_ids=ids, use_cache=False, mm_token_type_ids=kinds, **more).logits
        logp = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        logp[len(sample.prompt_ids) - 1 :].sum().backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-3, rtol=1e-3), name
    assert any("visual" in name and gradient.abs().max() > 0 for name, gradient in found.items())
