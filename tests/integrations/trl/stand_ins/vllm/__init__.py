"""A stand-in for the parts of vLLM that TRL's colocate mode and april use, for tests without vLLM.

One step is a forward pass of a tiny Hugging Face model per request. It is stricter than vLLM: the tokens of a step are
returned by the next one, as with asynchronous scheduling; sleep zeroes the weights; and a call that vLLM's memory would
not survive, such as a step or a load of weights while asleep, is an AssertionError. With tensor parallelism each
process computes everything and compares its requests and tokens with those of the other processes in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from vllm.sampling_params import RequestOutputKind

__version__ = "0.31.0"


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    detokenize: bool
    output_kind: RequestOutputKind


@dataclass
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class RequestOutput:
    """Type that TRL imports."""


class Sampled(NamedTuple):
    request: Request
    token: int
    logprob: float
    reason: str | None
    """Of the end of the request; None if it has not ended."""


class Model:
    """The model of the worker, whose weights are in memory that sleeping releases."""

    def __init__(self, path: str, engine: LLMEngine) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._engine = engine

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self._engine.asleep, "weights were loaded into memory that is released"
        assert not self._engine.requests, "weights were loaded while requests were in flight"
        own = dict(self.network.named_parameters())
        for name, weight in weights:
            assert own[name].shape == weight.shape
            own[name].data.copy_(weight)
            self._engine.note("load_weights")


class LLMEngine:
    def __init__(self, path: str, most: int, context_length: int, ranks: int, logprobs_mode: str) -> None:
        self.calls: list[str] = []
        """Calls so far; successive ones of the same name count once."""
        self.asleep: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.returned = 0
        """Tokens that `step` has returned."""
        self.steps = 0
        """Steps with requests."""
        self.scheduled: list[Sampled] = []
        """Tokens that the next step returns."""
        self._most = most
        self._group: Any = None
        model = Model(path, self)
        self.network = model.network
        runner = SimpleNamespace(model=model)
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        vocabulary = self.network.config.vocab_size
        self.model_config = SimpleNamespace(
            max_model_len=context_length, logprobs_mode=logprobs_mode, get_vocab_size=lambda: vocabulary
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(max_num_seqs=most, stream_interval=1),
            speculative_config=None,
        )
        if ranks > 1:
            firsts = range(0, dist.get_world_size(), ranks)
            self._group, _ = dist.new_subgroups_by_enumeration([list(range(rank, rank + ranks)) for rank in firsts])

    def add_request(self, request_id: str, prompt: Mapping[str, Any], params: SamplingParams) -> None:
        assert not self.asleep, "a request was added to an engine that sleeps"
        assert request_id not in self.requests
        assert params.output_kind is RequestOutputKind.DELTA
        assert params.logprobs == 0
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.model_config.max_model_len
        self.note("add_request")
        self.requests[request_id] = Request(request_id, list(prompt["prompt_token_ids"]), params)

    def abort_request(self, request_ids: list[str]) -> None:
        for id in request_ids:
            self.requests.pop(id, None)

    @torch.inference_mode()
    def step(self) -> list[SimpleNamespace]:
        running = [request for request in self.requests.values() if not request.finished][: self._most]
        self.steps += bool(running)
        assert not (running and self.asleep), "a step ran on an engine that sleeps"
        returned, self.scheduled = self.scheduled, [self._sample(request) for request in running]
        if self._group is not None:
            mine = [(sampled.request.id, sampled.token) for sampled in self.scheduled]
            each: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(each, mine, group=self._group)
            assert all(other == mine for other in each), "processes of one engine computed different batches"
        return [self._output(sampled) for sampled in returned if sampled.request.id in self.requests]

    def _sample(self, request: Request) -> Sampled:
        logits = self.network(torch.tensor([[*request.prompt, *request.tokens]])).logits[0, -1]
        logprobs = (logits / request.params.temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1))
        request.tokens.append(token)
        reason = None
        if token in request.params.stop_token_ids:
            reason = "stop"
        elif len(request.tokens) == request.params.max_tokens:
            reason = "length"
        request.finished = reason is not None
        return Sampled(request, token, float(logprobs[token]), reason)

    def _output(self, sampled: Sampled) -> SimpleNamespace:
        self.returned += 1
        if sampled.reason is not None:
            del self.requests[sampled.request.id]
        completion = SimpleNamespace(
            token_ids=[sampled.token],
            logprobs=[{sampled.token: SimpleNamespace(logprob=sampled.logprob)}],
            finish_reason=sampled.reason,
        )
        finished = sampled.reason is not None
        return SimpleNamespace(request_id=sampled.request.id, outputs=[completion], finished=finished)

    def note(self, call: str) -> None:
        if self.calls[-1:] != [call]:
            self.calls.append(call)


class LLM:
    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        max_num_seqs: int,
        tensor_parallel_size: int,
        enable_sleep_mode: bool,
        logprobs_mode: str,
        distributed_executor_backend: str,
        **settings: Any,
    ) -> None:
        assert distributed_executor_backend == "external_launcher"
        self.llm_engine = LLMEngine(model, max_num_seqs, max_model_len, tensor_parallel_size, logprobs_mode)
        self._enable_sleep_mode = enable_sleep_mode

    def sleep(self, level: int) -> None:
        engine = self.llm_engine
        assert self._enable_sleep_mode, "without sleep mode vLLM would release nothing"
        assert level == 2
        assert not engine.requests, "vLLM was put to sleep with requests in flight"
        assert not engine.scheduled, "vLLM was put to sleep while a batch was computed"
        assert not engine.asleep
        engine.note("sleep")
        engine.asleep = {"weights", "kv_cache"}
        for parameter in engine.network.parameters():
            parameter.data.zero_()

    def wake_up(self, tags: list[str]) -> None:
        for tag in tags:
            self.llm_engine.asleep.remove(tag)
            self.llm_engine.note(f"wake {tag}")

    def reset_prefix_cache(self) -> None:
        self.llm_engine.note("reset_prefix_cache")

    @property
    def calls(self) -> list[str]:
        return self.llm_engine.calls

    @property
    def steps(self) -> int:
        return self.llm_engine.steps
