"""vLLM in the trainer's process, on the stand-in for vLLM that TRL's tests use."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from april import Prompt, SamplingParams
from april.engines.device_turns import TurnState
from april.engines.job import Reply, _one_per_engine
from april.engines.vllm_inproc import VLLMInProcess
from april.rollout.engine import Capacity, Chunk
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.group import Group
from tests import tiny
from tests.engines.architectures import assert_behaviour
from tests.engines.interrupts import Moment, finish, moments
from tests.integrations.trl.colocated import STAND_INS

COUNT = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(path)
    return path


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(STAND_INS))
    import vllm

    yield vllm
    for name in ("vllm", "vllm.sampling_params"):
        del sys.modules[name]


def llm(vllm: Any, model: Path, slots: int) -> Any:
    return vllm.LLM(
        str(model),
        max_model_len=128,
        max_num_seqs=slots,
        tensor_parallel_size=1,
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="external_launcher",
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=moments(COUNT), slots=st.integers(1, COUNT), stream_interval=st.integers(1, 7), sleeps=st.booleans())
def test_every_token_that_vllm_returned_is_handed_out_once(
    vllm: Any, model: Path, schedule: list[Moment], slots: int, stream_interval: int, sleeps: bool
) -> None:
    async def main() -> VLLMInProcess:
        engine = VLLMInProcess(llm(vllm, model, slots), stream_interval=stream_interval)
        await finish(engine, group.samples, schedule)
        assert engine.running == 0
        if sleeps:
            await engine.sleep()
            assert engine.turns.state is TurnState.ASLEEP
        await engine.close()
        return engine

    sampling = SamplingParams(max_tokens=20, stop_token_ids=(1, 20, 21))
    group = Group.start(0, Prompt((5, 6, 7)), COUNT, sampling, seed=0)
    engine = asyncio.run(main())
    assert sum(sample.length for sample in group.samples) == engine._engine.returned
    assert_behaviour(tiny.model(), group.samples)


async def test_a_finished_sample_does_not_wait_for_the_interval(vllm: Any, model: Path) -> None:
    engine = VLLMInProcess(llm(vllm, model, 2), stream_interval=50)
    budgets = (3, 40)
    for number, budget in enumerate(budgets):
        (sample,) = Group.start(number, Prompt((5,)), 1, SamplingParams(max_tokens=budget), seed=0).samples
        engine.submit(sample)
    (first,) = await engine.poll()
    assert (len(first.token_ids), first.finish) == (3, FinishReason.LENGTH)
    (rest,) = await engine.interrupt()
    assert (len(rest.token_ids), rest.finish) == (3, None)
    await engine.close()


def test_processes_of_one_engine_that_sample_other_tokens_are_named() -> None:
    def reply(*tokens: int, error: str | None = None) -> Reply:
        return Reply([Chunk("0.0", tokens, [-1.0] * len(tokens), 0)], 1, Capacity(1, 8), error)

    same = _one_per_engine([reply(1), reply(1), reply(2), reply(2)], 2)
    assert [(each.chunks[0].token_ids, each.error) for each in same] == [((1,), None), ((2,), None)]
    (other,) = _one_per_engine([reply(1, 2), reply(1, 3)], 2)
    assert other.error == "process 1 computes the same engine and sampled other tokens"
    (failed,) = _one_per_engine([reply(1), reply(error="out of memory")], 2)
    assert failed.error == "out of memory"
