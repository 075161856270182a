"""The embedded engine in a separate process: its tokens, its interrupts and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from april import EngineError, Group, Prompt, RolloutParams, RolloutScheduler, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.process import EngineProcess
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.pool import EnginePool
from tests import tiny
from tests.limits import HANG


def test_the_cache_uses_most_of_a_dedicated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.engines.device_memory.free_bytes", lambda device: 1000)
    assert EmbeddedSettings(model="").budget(torch.device("cuda:0")) == 800
    assert EmbeddedSettings(model="", kv_cache_bytes=7).budget(torch.device("cuda:0")) == 7
    assert EmbeddedSettings(model="").budget(torch.device("cpu")) is None, "the machine's memory is for others as well"


async def no_reward(prompt: Prompt, samples: object) -> list[float]:
    return [0.0] * 2


async def test_the_process_returns_the_tokens_of_a_local_engine_and_ends_on_close(tmp_path: Path) -> None:
    tiny.save(tmp_path / "policy")
    engine = await EngineProcess.start(
        EmbeddedSettings(model=str(tmp_path / "policy"), threads=1, context_length=128, max_num_seqs=6)
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
        policies = [{n: p + 0.05 * i * torch.randn_like(p) for n, p in parameters(model).items()} for i in range(3)]
        own = EmbeddedEngine(model, context_length=128, max_num_seqs=6, stop_token_ids=())
        assert (engine.capacity.slots, engine.capacity.context_length) == (6, 128)
        found = [await responses(each, policies, tmp_path) for each in (own, engine)]
        assert found[0] == found[1]
        save_file({"nothing": torch.zeros(1)}, tmp_path / "weights" / "model.safetensors")
        with pytest.raises(EngineError, match="no parameter named"):
            await engine.update_weights(9, tmp_path / "weights")
        (tmp_path / "weights" / "model.safetensors").write_bytes(b"torn")
        with pytest.raises(EngineError, match=r"(?i)header"):
            await asyncio.wait_for(engine.update_weights(9, tmp_path / "weights"), HANG)

        os.kill(engine.process.pid, signal.SIGSTOP)
        engine.submit(Group.start(99, Prompt((5, 6)), 1, SamplingParams(max_tokens=100), seed=0).samples[0])
        engine.patience = 0.1
        with pytest.raises(EngineError, match="hung: it left 'ping' unanswered"):
            await engine.poll()
        await engine.interrupt()
        assert await engine.poll() == []
        with pytest.raises(EngineError, match="hung"):
            await engine.update_weights(9, tmp_path / "weights")

        pool = EnginePool([engine, own])  # which finds out before it gives anything to a process that is dead
        await pool.update_weights(10, policies[0])
        sample = Group.start(100, Prompt((5, 6)), 1, SamplingParams(max_tokens=5), seed=0).samples[0]
        pool.submit(sample)
        assert {chunk.sample_id for chunk in await pool.poll()} == {sample.id}
        assert [member.ready for member in pool.members] == [False, True]
        await pool.close()
    finally:
        await engine.close()


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


async def responses(
    engine: EmbeddedEngine | EngineProcess, policies: list[dict[str, torch.Tensor]], directory: Path
) -> dict[str, object]:
    """Synchronous steps, interrupts in the midst of them, and weights that change in between."""
    prompts = (Prompt((5, 6, 7 + i % 5), str(i)) for i in range(100))
    params = RolloutParams(rollout_batch_size=3, n_samples_per_prompt=2, partial_rollout=False)
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(20, 21))
    said: dict[str, object] = {}
    (directory / "weights").mkdir(exist_ok=True)
    async with RolloutScheduler(engine, prompts, no_reward, params, sampling=sampling, reward_scope="group") as it:
        for policy in policies:
            collecting = asyncio.create_task(it.next_batch())
            while not collecting.done() and it.step_tokens < 40:
                await asyncio.sleep(0)
            if not collecting.done():  # every token is kept, and the step resumes from there
                collecting.cancel()
                await asyncio.wait([collecting])
            step = await (it.next_batch() if collecting.cancelled() else collecting)
            said |= {s.id: (s.response_ids, list(s.versions), s.finish) for g in step.groups for s in g.samples}
            save_file(policy, directory / "weights" / "model.safetensors")
            await it.update_weights(directory / "weights" if isinstance(engine, EngineProcess) else policy)
    return said
