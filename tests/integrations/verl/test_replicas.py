"""Requests to verl's replicas: their contents, their answers, and their behaviour around an abort."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

import numpy as np
import torch
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from april import Capacity, Chunk, EngineError, FinishReason, Group, Prompt, Sample, SamplingParams
from april.engines.servers.server_routes import ServerRoutes
from april.integrations.verl.manager import AprilRolloutManager
from april.integrations.verl.replicas import CALLS, ReplicaEngine, capacity_of


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 16 * 64),
        ({"tensor_model_parallel_size": 2}, 8 * 64),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 4}, 2 * 4 * 64),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 4, "name": "sglang"}, 2 * 64),
        ({"data_parallel_size": 16}, CALLS),
    ],
)
def test_slots_are_summed_over_the_ranks_that_receive_requests(settings: dict[str, Any], slots: int) -> None:
    one = {"name": "vllm", "tensor_model_parallel_size": 1, "max_num_seqs": 64}
    config = RolloutConfig(prompt_length=10, response_length=20, **{**one, **settings})
    capacity, calls, replicas = capacity_of(config, gpus=16)
    assert capacity.slots % replicas == calls % replicas == 0
    assert capacity.slots == slots
    assert capacity.context_length == 30
    assert calls >= slots


class Gate:
    """A client whose requests wait until the test answers them, and an abort that does not reach them."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.answers: list[asyncio.Future[TokenOutput]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.asked.append((prompt_ids, sampling_params["max_tokens"]))
        self.answers.append(asyncio.Future())
        return await self.answers[-1]

    async def abort(self) -> None: ...


def engine_of(client: Any, **settings: Any) -> ReplicaEngine:
    async def abort() -> None: ...

    return ReplicaEngine(client, Capacity(8, 100), {}, abort, patience=0.01, **settings)


def samples(count: int) -> list[Sample]:
    return Group.start(0, Prompt((1, 2, 3)), count, SamplingParams(max_tokens=5), seed=0).samples


async def interrupted_in_vain() -> tuple[ReplicaEngine, Gate, Sample]:
    """A sample whose request did not answer the interrupt."""
    client = Gate()
    engine = engine_of(client)
    (sample,) = samples(1)
    engine.submit(sample)
    await asyncio.sleep(0)
    assert await engine.interrupt() == []
    assert engine.running == 0
    await engine.update_weights(3)
    return engine, client, sample


async def test_a_request_that_waits_at_a_closed_replica_is_not_sent_twice() -> None:
    """An abort ends running requests. Later requests wait at the replica, and are answered when generation resumes."""
    engine, client, sample = await interrupted_in_vain()
    client.answers[0].set_result(TokenOutput(token_ids=[7, 8], log_probs=[-1.0, -2.0], stop_reason="completed"))
    await asyncio.sleep(0.01)
    assert await engine.poll() == [], "an answer that nobody asked for now"
    engine.submit(sample)
    (chunk,) = await engine.poll()
    assert chunk == Chunk(sample.id, [7, 8], [-1.0, -2.0], 3, FinishReason.STOP)
    assert client.asked == [([1, 2, 3], 5)]


async def test_each_request_of_a_sample_has_its_images() -> None:
    """Also the one after a late answer to an abort, and one that checks the health of replicas has none."""
    asked: list[tuple[list[int], Any]] = []
    answers: list[asyncio.Future[TokenOutput]] = []

    class Client:
        async def generate(self, request_id: str, prompt_ids: list[int], image_data: Any = None, **_: Any) -> Any:
            asked.append((prompt_ids, image_data))
            answers.append(asyncio.Future())
            return await answers[-1]

    def media(sample: Sample) -> dict[str, Any] | None:
        return None if sample.group_id < 0 else {"image_data": ["cat"]}

    engine = engine_of(Client(), media=media, undrawn=[2])
    (sample,) = samples(1)
    engine.submit(sample)
    await asyncio.sleep(0)
    await engine.interrupt()
    engine.submit(sample)
    answers[0].set_result(TokenOutput(token_ids=[7], log_probs=[-1.0], stop_reason="aborted"))
    await engine.poll()
    await asyncio.sleep(0)
    engine.submit(Sample(-1, 0, (1, 2, 3), SamplingParams(max_tokens=5), 0))
    await asyncio.sleep(0)
    assert asked == [([1, 2, 3], ["cat"]), ([1, 2, 3, 7], ["cat"]), ([1], None)]
    answers[1].set_result(TokenOutput(token_ids=[2], log_probs=[-1.0], stop_reason="completed"))
    (chunk,) = await engine.poll()
    assert (chunk.token_ids, chunk.finish, chunk.error) == ((), None, "the replica drew 2, a placeholder")


@pytest.mark.parametrize("resubmitted_first", [False, True])
async def test_a_late_answer_to_an_abort_is_no_failure(resubmitted_first: bool) -> None:
    """Its tokens count, with the version that sampled them, and the sample resumes after them."""
    engine, client, sample = await interrupted_in_vain()
    late = TokenOutput(
        token_ids=[7, 8], log_probs=[-1.0, -2.0], stop_reason="aborted", extra_fields={"global_steps": 2}
    )
    if resubmitted_first:
        engine.submit(sample)
        client.answers[0].set_result(late)
    else:
        client.answers[0].set_result(late)
        await asyncio.sleep(0.01)
        engine.submit(sample)
    assert await engine.poll() == [Chunk(sample.id, [7, 8], [-1.0, -2.0], 2)]
    await asyncio.sleep(0)
    assert client.asked[1:] == [([1, 2, 3, 7, 8], 3)]
    client.answers[1].set_result(TokenOutput(token_ids=[9], log_probs=[-3.0], stop_reason="completed"))
    assert await engine.poll() == [Chunk(sample.id, [9], [-3.0], 3, FinishReason.STOP)]


def played(end: int, version: int) -> Any:
    """Routes of the first `end` tokens as a replica returns them: for all layers, of which the first one is dense."""
    rows = (np.arange(end)[:, None, None] + np.arange(3)[:, None] + np.arange(2) + 3 * version) % 8
    return (rows * (np.arange(3) > 0)[:, None]).astype(np.uint8)


async def test_a_trajectory_has_the_routes_of_the_versions_that_drew_it() -> None:
    client, shape = Gate(), ServerRoutes((1, 2), 3, 2, 8)
    engine = engine_of(client, routes=shape)
    (sample,) = samples(1)

    async def answer(ids: list[int], reason: str, version: int) -> None:
        engine.submit(sample)
        await asyncio.sleep(0)
        tokens = 3 + sample.length + len(ids)
        output = TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason)
        output.extra_fields["global_steps"], output.routed_experts = version, played(tokens - 1, version)
        client.answers[-1].set_result(output)
        chunks = await (engine.interrupt() if reason == "aborted" else engine.poll())
        for chunk in chunks:
            assert chunk.error is None
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            sample.route(chunk.routes, chunk.version, False)

    await answer([7, 8], "aborted", 0)
    await engine.update_weights(1)
    await answer([9, 10], "completed", 1)
    manager = object.__new__(AprilRolloutManager)
    manager._routes, manager.loops, manager.reward_loop_worker_handles = shape, None, None
    manager.encoder = SimpleNamespace(images=lambda uid, token_ids: (), settings={})
    assert manager._outputs("", sample)[0].routed_experts is None  # for rewards: they are as large as the trainer's
    made = manager._scored_outputs("", sample)[0].as_dict()["routed_experts"]
    # verl indexes rows by the place of a token, and leaves the last one at zero.
    expected = [*played(4, 0), *played(6, 1)[4:], np.zeros((3, 2))]
    assert made.dtype is torch.int16
    assert made.tolist() == np.stack(expected).astype(int).tolist()


async def test_routes_of_another_model_fail_their_request() -> None:
    client = Gate()
    engine = engine_of(client, routes=ServerRoutes((1, 2), 4, 2, 8))
    (sample,) = samples(1)
    engine.submit(sample)
    await asyncio.sleep(0)
    output = TokenOutput(token_ids=[7, 8], log_probs=[-1.0] * 2, stop_reason="completed")
    output.routed_experts = played(4, 0)
    client.answers[0].set_result(output)
    (chunk,) = await engine.poll()
    assert chunk.error == (
        "routes of shape [4, 3, 2] came where the policy has 4 layers with 2 experts a token: the server has another "
        "model"
    )
    assert (list(chunk.token_ids), chunk.finish) == ([], None)


@pytest.mark.parametrize("named", [False, True])
async def test_a_forgotten_sample_starts_from_its_own_tokens(named: bool) -> None:
    engine, client, sample = await interrupted_in_vain()
    engine.forget([sample.id] if named else None)
    engine.submit(sample)
    await asyncio.sleep(0)
    assert client.asked == [([1, 2, 3], 5)] * 2
    assert client.answers[0].cancelled()


async def test_replicas_are_given_no_more_calls_than_leave_room_for_an_abort() -> None:
    client = Gate()
    engine = engine_of(client, calls=2)
    first, second, third, fourth = samples(4)
    for sample in (first, second, third, fourth):
        engine.submit(sample)
    await asyncio.sleep(0)
    assert len(client.asked) == 2
    client.answers[1].set_result(TokenOutput(token_ids=[7], log_probs=[-1.0], stop_reason="completed"))
    assert [chunk.sample_id for chunk in await engine.poll()] == [second.id]
    await asyncio.sleep(0)
    assert len(client.asked) == 3
    for answer in client.answers[::2]:
        answer.set_result(TokenOutput(token_ids=[8], log_probs=[-1.0], stop_reason="completed"))
    assert {chunk.sample_id for chunk in await engine.interrupt()} == {first.id, third.id}
    await asyncio.sleep(0.01)
    assert len(client.asked) == 3, "a request was sent after the abort"
    assert await engine.poll() == []


async def test_an_abort_ends_all_requests_so_a_partial_interrupt_is_refused() -> None:
    client = Gate()
    engine = engine_of(client, calls=2)
    mine = samples(3)
    for sample in mine:
        engine.submit(sample)
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="aborts all requests together: 1 samples in flight were not named"):
        await engine.interrupt([mine[0].id])
    assert await engine.interrupt([mine[2].id, "no such sample"]) == [], "it waited here"
    for answer in client.answers:
        answer.set_result(TokenOutput(token_ids=[7], log_probs=[-1.0], stop_reason="aborted"))
    chunks = await engine.interrupt([sample.id for sample in mine])
    assert sorted(chunk.sample_id for chunk in chunks) == [mine[0].id, mine[1].id]
    assert await engine.poll() == []


@pytest.mark.parametrize("max_num_seqs", [256, 4096])
def test_an_abort_finds_a_call_free_at_verls_replica(max_num_seqs: int) -> None:
    replica = SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs))
    assert RolloutReplica.max_concurrency.fget(replica) > max(CALLS, max_num_seqs)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (TokenOutput(token_ids=[7], log_probs=None, stop_reason="completed"), "1 tokens and 0 log-probabilities"),
        (TokenOutput(token_ids=[], log_probs=[], stop_reason="completed"), "without a token"),
        (TokenOutput(token_ids=[7], log_probs=[-1.0], stop_reason="aborted"), "aborted"),
        (RuntimeError("the replica died"), "the replica died"),
    ],
)
async def test_a_failed_request_is_retried_by_the_scheduler(output: Any, error: str) -> None:
    class Client:
        async def generate(self, **_: Any) -> TokenOutput:
            if isinstance(output, Exception):
                raise output
            return output

    engine = engine_of(Client())
    (sample,) = samples(1)
    engine.submit(sample)
    (chunk,) = await engine.poll()
    assert error in chunk.error
    assert chunk.finish is None
