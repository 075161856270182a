"""The engines of all ranks as one, which real ranks drive, against one engine in one process."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from april import Sample
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.kv_cache import KVCache
from april.rollout.engine import Engine, EngineError
from april.training.distributed_learner import DistributedLearner, follow_commands
from april.training.embedded_engine import embedded
from april.training.learner_settings import LearnerSettings
from april.training.offload import Part
from april.training.rank_engine import AllRanksEngine, FollowerEngine
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner
from tests import tiny
from tests.engines.architectures import append, cached, continuation, responses, samples
from tests.engines.interrupts import Moment, finish
from tests.training.steps import recipe, rollout

STOPS = [Moment(1, frozenset({0, 3, 4}), False), Moment(2, frozenset({1, 4, 7}), True), Moment(0, frozenset(), False)]


@contextmanager
def engines(ranks: Ranks, directory: str, **engine: Any) -> Iterator[tuple[DistributedLearner, AllRanksEngine] | None]:
    """In the leader, itself and the engines of all ranks as one; None in the others once the leader is through."""
    chosen = settings(**engine)
    learner = ShardedLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen), ranks)
    if not ranks.leads:
        follow_commands(
            learner, ranks, FollowerEngine(lambda: embedded(chosen, learner.served, beside_trainer=True), ranks)
        )
        yield None
        return
    with (
        DistributedLearner(learner, ranks, Path(directory)) as leader,
        leader.generating(embedded(chosen, leader.served, beside_trainer=True)) as together,
    ):
        assert isinstance(together, AllRanksEngine)
        yield leader, together


def settings(**engine: Any) -> Recipe:
    chosen = recipe()
    chosen.engine.kv_cache_gb, chosen.engine.context_length, chosen.engine.stream_interval = 0.01, 128, 2
    for name, value in engine.items():
        setattr(chosen.engine, name, value)
    return chosen


async def generated(engine: Engine, stops: Sequence[Moment] = ()) -> list[Sample]:
    made = samples()
    await finish(engine, made, stops)
    return made


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    assert responses(found) == responses(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)


def compare(ranks: Ranks, directory: str) -> None:
    """Before and after an update, with samples that are stopped and resumed. Prints when a rank gives up its KV cache
    and when it trains."""
    note_calls(KVCache, "release")
    note_calls(ShardedLearner, "train")
    with engines(ranks, directory) as found:
        if found is not None:
            asyncio.run(_compare(*found))


async def _compare(leader: DistributedLearner, engine: AllRanksEngine) -> None:
    assert_same(await generated(engine), await generated(alone(leader.served)))
    assert all(member.given for member in engine.members)
    begun = await begin(engine)
    engine.forget()
    await engine.interrupt()
    updated = await update(leader, engine)
    assert_same(await generated(engine, STOPS), await generated(alone(updated)))
    again = copy.deepcopy(begun)
    await finish(engine, begun, [])
    reference = alone(updated)
    await reference.update_weights(1)
    await finish(reference, again, [])
    assert_same(begun, again)


def in_turns(ranks: Ranks, directory: str) -> None:
    """Engines and trainer use the devices in turn: the tokens equal the ones with separate devices."""
    with engines(ranks, directory) as found:
        if found is not None:
            asyncio.run(_in_turns(*found))


async def _in_turns(leader: DistributedLearner, engine: AllRanksEngine) -> None:
    reference = alone(copy.deepcopy(leader.served))
    leader.to_host()
    begun = await begin(engine)
    again = copy.deepcopy(begun)
    await engine.sleep()
    leader.to_device()
    assert sum(parameter.untyped_storage().nbytes() for parameter in leader.served.parameters()) == 0
    leader.train(rollout(1), 1)
    leader.to_host({Part.GRADIENTS, Part.OPTIMIZER})
    await engine.wake_weights()
    await engine.update_weights(1, leader.weights(1))
    leader.to_host()
    await engine.wake_kv_cache()
    await finish(engine, begun, [])
    reference._model._source.load_state_dict(leader.served.state_dict())
    await reference.update_weights(1)
    await finish(reference, again, [])
    assert_same(begun, again)


def alone(model: Any) -> EmbeddedEngine:
    return embedded(settings(), model, beside_trainer=True)


async def begin(engine: Engine) -> list[Sample]:
    """Samples that are stopped after their first tokens."""
    begun = samples(seed=8)
    for sample in begun:
        engine.submit(sample)
    append(begun, await engine.poll())
    append(begun, await engine.interrupt())
    begun = [sample for sample in begun if sample.finish is None and sample.length]
    assert len(begun) > 4
    return begun


async def update(leader: DistributedLearner, engine: Engine) -> Any:
    """Train on a step, and return the policy whose weights the engine has then."""
    leader.train(rollout(1), 1)
    await engine.update_weights(1, leader.weights(1))
    updated = tiny.model(sharpness=1.0)
    gathered = [pair for names in leader._learner.buckets() for pair in leader._on_all_ranks("gather", names)]
    updated.load_state_dict(dict(gathered), strict=False)
    assert (updated.lm_head.weight != tiny.model(sharpness=1.0).lm_head.weight).any()
    return updated


def keep(ranks: Ranks, directory: str) -> None:
    """Keys and values of stopped samples outlive an update on every rank."""
    with engines(ranks, directory, on_update="keep") as found:
        if found is not None:
            asyncio.run(_keep(*found))


async def _keep(leader: DistributedLearner, engine: AllRanksEngine) -> None:
    begun = await begin(engine)
    before = {sample.id: sample.length for sample in begun}
    updated = await update(leader, engine)
    await finish(engine, begun, [])
    for sample in begun:
        held = len(sample.prompt_ids) + before[sample.id] - 1
        expected = continuation(updated, sample, cached(tiny.model(sharpness=1.0), sample, held))
        found = torch.tensor(sample.logprobs[before[sample.id] :])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, check_dtype=False)


def note_calls(kind: Any, name: str) -> None:
    """Have a method print its name."""
    method = getattr(kind, name)

    def noted(self: Any, *arguments: Any) -> Any:
        print(name, flush=True)
        return method(self, *arguments)

    setattr(kind, name, noted)


def lack_memory(ranks: Ranks, directory: str) -> None:
    """Fail in the second rank: once, and permanently after an update. Prints the errors that the leader receives."""
    if ranks.rank == 1:
        run_short(EmbeddedEngine)
    with engines(ranks, directory) as found:
        if found is not None:
            asyncio.run(_lack_memory(*found))


def run_short(kind: Any) -> None:
    """Have the fifth forward pass, and all with the weights of version 1, run out of memory."""
    compute, passes = kind._compute, itertools.count(1)

    def short(self: Any) -> Any:
        if self.version == 1 or next(passes) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return compute(self)

    kind._compute = short


async def _lack_memory(leader: DistributedLearner, engine: AllRanksEngine) -> None:
    before = engine.capacity.kv_tokens
    assert_same(await generated(engine), await generated(alone(leader.served)))
    after = engine.capacity.kv_tokens
    assert before is not None
    assert after is not None
    assert after < before
    await engine.update_weights(1, leader.weights(1))
    try:
        await generated(engine)
    except EngineError as error:
        print(error, flush=True)
    await engine.interrupt()
