"""vLLM in the trainer's own process: no server, one machine, one device for both.

Written to vLLM 0.32. Importing it needs vLLM in this environment. Set `VLLM_ENABLE_V1_MULTIPROCESSING=0` before vLLM is
imported (`VLLMInProcess.load` does), or weights could not be handed over as tensors.

Invariants:
- vLLM steps in one worker thread and nothing else touches it there while it does;
- vLLM returns nothing for an aborted request, so every token is kept as it is sampled;
- KV caches of different versions never mix: every request names its weights in the cache's salt.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from april.engines.chunk_queue import parted
from april.engines.fit import require_fit
from april.engines.weight_transfer import Tensors, directory_of
from april.rollout.engine import Capacity, Chunk, EngineError
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class InProcessRequest:
    sample_id: str
    received: int = 0


class VLLMInProcess:
    """A `vllm.LLM` as an engine. `VLLMInProcess.load(model, …)` makes both.

    Args:
        llm: made with `logprobs_mode="processed_logprobs"` and the worker extension `load` names.
        vocab_size: of the model.
        ignore_eos: generate past the model's end-of-sequence tokens where a sample names no stop tokens.
    """

    def __init__(self, llm: Any, vocab_size: int | None = None, ignore_eos: bool = False) -> None:
        config = llm.llm_engine.vllm_config
        if config.model_config.logprobs_mode != "processed_logprobs":
            raise ValueError('logprobs_mode must be "processed_logprobs": pass it to vllm.LLM')
        if config.speculative_config is not None:
            raise ValueError("vLLM is to speculate: in this process it must not; leave speculative_config out")
        self._llm = llm
        self._engine = llm.llm_engine
        self._ignore_eos = ignore_eos
        self._vocab_size = vocab_size or config.model_config.get_vocab_size()
        self.capacity = Capacity(
            slots=config.scheduler_config.max_num_seqs, context_length=config.model_config.max_model_len
        )
        self.version = 0
        self._salt = 0
        self._numbers = itertools.count()
        self._requests: dict[str, InProcessRequest] = {}
        self._new: list[tuple[str, Any, Any]] = []
        self._chunks: list[Chunk] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._stepping: asyncio.Future[list[Any]] | None = None

    @classmethod
    def load(cls, model: str, *, ignore_eos: bool = False, **settings: Any) -> VLLMInProcess:
        """Load `model` (directory or hub name); `settings` are passed to `vllm.LLM`."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        defaults = {
            "logprobs_mode": "processed_logprobs",
            "distributed_executor_backend": "uni",
            "worker_extension_cls": "april.engines.servers.vllm_worker.WorkerExtension",
        }
        return cls(LLM(model, **{**defaults, **settings}), ignore_eos=ignore_eos)

    @property
    def running(self) -> int:
        return min(len(self._requests), self.capacity.slots)

    def submit(self, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = sample.sampling
        require_fit(sample, self.capacity.context_length, self._vocab_size, "vLLM in this process")
        ids = [*sample.prompt_ids, *sample.response_ids]
        params = SamplingParams(
            max_tokens=sample.room(self.capacity.context_length),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            # The sample's stop tokens replace the model's: at other tokens its response has not ended.
            ignore_eos=self._ignore_eos or bool(sampling.stop_token_ids),
            # 0 requests the log-probability of the sampled token alone.
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # Each submission has its own id: late output of an aborted request must not reach the resumed sample.
        request_id = f"{sample.id}-{next(self._numbers)}"
        prompt = {"prompt_token_ids": ids, "cache_salt": str(self._salt)}
        self._requests[request_id] = InProcessRequest(sample.id)
        self._new.append((request_id, prompt, params))

    async def poll(self) -> list[Chunk]:
        while not self._chunks and self._requests:
            await self._step()
        return self._take()

    async def _step(self) -> None:
        if self._stepping is None:
            new, self._new = self._new, []
            self._stepping = asyncio.get_running_loop().run_in_executor(self._thread, self._advance, new)
        # A cancelled poll leaves the step to the next one, and of several who wait for a step the first takes it.
        step = self._stepping
        await asyncio.wait([step])
        if self._stepping is step:
            self._stepping = None
            for output in step.result():
                self._absorb(output)

    def _advance(self, new: list[tuple[str, Any, Any]]) -> list[Any]:
        try:
            for request_id, prompt, params in new:
                self._engine.add_request(request_id, prompt, params)
            return list(self._engine.step())
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error

    def _absorb(self, output: Any) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        logprobs = [scored[token].logprob for token, scored in zip(ids, completion.logprobs or [], strict=True)]
        request.received += len(ids)
        finish = None
        if output.finished:
            del self._requests[output.request_id]
            finish = FINISH[completion.finish_reason]
        if ids or finish is not None:
            self._chunks.append(Chunk(request.sample_id, ids, logprobs, self.version, finish))

    def _take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        chunks, self._chunks = parted(self._chunks, sample_ids)
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        chosen = {id for id, request in self._requests.items() if named is None or request.sample_id in named}
        running = chosen.difference(id for id, _, _ in self._new)
        self._new = [request for request in self._new if request[0] not in chosen]
        await self._call(self._engine.abort_request, list(running))
        if self._stepping is not None:  # it may have begun before the abort, and sampled for them
            await self._step()
        for id in chosen:
            self._requests.pop(id, None)
        return self._take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`: from `Tensors`, or a directory of safetensors."""
        assert not self._requests, "weights change only while nothing is in flight"
        if isinstance(weights, Tensors):
            await self._call(self._reload, {"weights_iterator": iter(weights)})
        else:
            await self._call(self._reload, {"weights_path": directory_of(weights)})
        self._salt += 1
        self.version = version

    def _reload(self, weights: dict[str, Any]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs=weights)
        # On a CPU, vLLM computes with a copy of a tied output layer, which the reload does not refresh.
        self._llm.collective_rpc("refresh_output_layer")
        self._engine.reset_prefix_cache()

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is held but the prefix cache, which vLLM evicts by itself."""

    async def close(self) -> None:
        await self.interrupt()
        self._thread.shutdown()
