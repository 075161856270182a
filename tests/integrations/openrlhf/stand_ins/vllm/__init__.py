"""Stands in for vLLM, whose build for CPUs is of another version: the names that OpenRLHF and april use of it, over a
Hugging Face model that samples one token a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__version__ = "0.29.0"


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: Any = None
    stop: Any = None
    include_stop_str_in_output: bool = False


class AsyncEngineArgs(SimpleNamespace):
    pass


@dataclass
class AsyncLLMEngine:
    model: Any
    vllm_config: Any
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    asleep: set[str] = field(default_factory=set)
    """What is asleep: weights, KV cache."""
    received: Any = None
    """Receives weights."""

    @classmethod
    def from_engine_args(cls, args: Any) -> AsyncLLMEngine:
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        scheduler, config = SimpleNamespace(max_num_seqs=8), SimpleNamespace(max_model_len=args.max_model_len)
        return cls(model, SimpleNamespace(scheduler_config=scheduler, model_config=config))

    async def is_sleeping(self) -> bool:
        return False

    @property
    def output_processor(self) -> Any:
        return SimpleNamespace(get_num_unfinished_requests=lambda: self.running)

    async def sleep(self, level: int = 1) -> None:
        assert not self.running, "the engine is put to sleep while requests run"
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    async def reset_prefix_cache(self) -> None:
        """There is none."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        """Call a method of OpenRLHF's `WorkerWrap`. `update_weight` takes the path of a state dict, too."""
        assert not self.running, "weights change while requests run"
        await asyncio.to_thread(getattr(self, f"_{method}"), *args)

    def _init_process_group(self, host: str, port: int, rank: int, world_size: int, *_: Any) -> None:
        from openrlhf.utils.distributed_util import stateless_init_process_group

        self.received = stateless_init_process_group(host, port, rank, world_size, "cpu")

    def _update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        assert "weights" not in self.asleep, "weights change while they sleep"
        if dtype is None:
            self.model.load_state_dict(torch.load(name))
            return
        weight = torch.empty(shape, dtype=dtype)
        self.received.broadcast(weight, src=0)
        self.model.load_state_dict({name: weight}, strict=False)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        ids = list(prompt["prompt_token_ids"])
        eos = self.model.config.eos_token_id
        assert not self.asleep, "a request reached an engine that sleeps"
        self.running += 1
        try:
            for number in range(params.max_tokens):
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1].float() / params.temperature
                if number < params.min_tokens:
                    logits[eos] = -torch.inf
                logprobs = logits.log_softmax(-1)
                token = int(torch.multinomial(logprobs.exp(), 1))
                ids.append(token)
                stopped = token == eos
                reason = "stop" if stopped else "length" if number + 1 == params.max_tokens else None
                drawn = [{token: SimpleNamespace(logprob=float(logprobs[token]))}]
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=[token], logprobs=drawn, finish_reason=reason)]
                )
                if reason is not None:
                    return
                await asyncio.sleep(0)
        except GeneratorExit:
            self.aborted.append(request_id)
            raise
        finally:
            self.running -= 1
