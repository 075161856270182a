"""The embedded engine gives its memory to the trainer and takes it back."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from april.engines.device_turns import SleepingEngine, TurnState
from april.engines.embedded import EmbeddedEngine
from april.rollout.engine import EngineError
from april.rollout.trajectory.sample import Sample
from tests.engines.architectures import append, model, perturb, responses, run, samples
from tests.limits import HANG

OWN_COPY = pytest.mark.parametrize("dtype", [None, torch.float64])


def engine(policy: torch.nn.Module, dtype: torch.dtype | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(policy, kv_cache_bytes=1 << 24, max_num_seqs=8, dtype=dtype)


async def begun(subject: EmbeddedEngine) -> list[Sample]:
    made = samples(seed=3)
    for sample in made:
        subject.submit(sample)
    for _ in range(5):
        append(made, await subject.poll())
    append(made, await subject.interrupt())
    assert any(sample.finish is None and sample.length for sample in made)
    return made


async def turn(subject: EmbeddedEngine, version: int) -> None:
    await subject.sleep()
    await subject.wake_weights()
    await subject.update_weights(version)
    await subject.wake_kv_cache()


def cache_bytes(subject: EmbeddedEngine) -> int:
    return sum(pool.untyped_storage().nbytes() for pool in subject._scheduler.cache._pools)


@OWN_COPY
async def test_samples_continue_as_if_the_engine_had_only_been_updated(dtype: torch.dtype | None) -> None:
    policy = model()
    slept, updated = engine(copy.deepcopy(policy), dtype), engine(copy.deepcopy(policy), dtype)
    one, other = await begun(slept), await begun(updated)
    for subject in (slept, updated):
        perturb(subject._model._source, 5)
    await turn(slept, 1)
    await updated.update_weights(1)
    found = await run(slept, [sample for sample in one if sample.finish is None])
    expected = await run(updated, [sample for sample in other if sample.finish is None])
    assert responses(found) == responses(expected)
    assert [list(sample.logprobs) for sample in found] == [list(sample.logprobs) for sample in expected]
    assert isinstance(slept, SleepingEngine)


@OWN_COPY
async def test_a_sleeping_engine_holds_neither_cache_nor_a_copy_of_the_weights(dtype: torch.dtype | None) -> None:
    policy = model()
    subject = engine(policy, dtype)
    await begun(subject)
    assert cache_bytes(subject) > 0
    weights = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    await subject.sleep()
    assert cache_bytes(subject) == 0
    held = sum(parameter.untyped_storage().nbytes() for parameter in subject._model.module.parameters())
    shared = sum(parameter.untyped_storage().nbytes() for parameter in policy.parameters())
    assert held == (0 if dtype else shared)
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.named_parameters()), "the trainer's own"
    await subject.wake_weights()
    await subject.update_weights(1)
    for name, tensor in subject._model.module.named_parameters():
        assert torch.equal(tensor, weights[name].to(tensor.dtype))
    await subject.wake_kv_cache()
    assert subject.turns.serving


async def test_a_sleeping_engine_takes_no_samples() -> None:
    subject = engine(model())
    await subject.sleep()
    with pytest.raises(AssertionError, match="the embedded engine is asleep: it takes no samples"):
        subject.submit(samples()[0])
    with pytest.raises(AssertionError, match="cannot become"):
        await subject.wake_kv_cache()
    await subject.wake_weights()
    with pytest.raises(KeyError):
        await subject.update_weights(1, [("unknown", torch.zeros(1))])
    assert subject.turns.state is TurnState.WEIGHTS_AWAKE
    await subject.update_weights(1)
    await subject.wake_kv_cache()
    assert responses(await run(subject, samples())) == responses(await run(engine(model()), samples()))


async def test_an_engine_with_samples_in_flight_does_not_sleep() -> None:
    subject = engine(model())
    subject.submit(samples()[0])
    with pytest.raises(AssertionError, match="in flight"):
        await subject.sleep()
    assert subject.turns.state is TurnState.SERVING
    await subject.interrupt()
    await turn(subject, 1)
    with pytest.raises((AssertionError, EngineError)):
        await asyncio.wait_for(subject.wake_weights(), HANG)
