"""vLLM in the trainer's own process: no server, one machine, one device for both.

Written to vLLM 0.32. vLLM 0.22 to 0.31 have the same calls, except for `load` and `update_weights`. It needs vLLM in
this environment. Set `VLLM_ENABLE_V1_MULTIPROCESSING=0` before vLLM is imported (`VLLMInProcess.load` does): otherwise
vLLM starts a process of its own, and tensors cannot be passed to it.

Invariants:
- vLLM steps in one worker thread, and only that thread calls vLLM while samples are in flight;
- vLLM returns nothing for an aborted request, so every token is kept as it is sampled;
- KV caches of different versions never mix: every request names its weights in the cache's salt;
- the number of steps between two polls depends on the tokens alone: engines that compute the same tokens in several
  processes (tensor parallelism) take the same steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from april.engines.chunk_queue import parted
from april.engines.device_turns import DeviceTurns, TurnState
from april.engines.fit import require_fit
from april.engines.weight_transfer import Tensors, directory_of
from april.rollout.engine import Capacity, Chunk, EngineError
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


DRAINING_STEPS = 3
"""Steps without requests after which no batch of aborted requests is left: vLLM schedules at most two in advance."""


@dataclass(slots=True)
class InProcessRequest:
    """A request in flight, and the tokens that were sampled for it since the last chunk."""

    sample_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Advance:
    """Outputs of a number of consecutive steps of vLLM."""

    outputs: list[Any]
    steps: int


class VLLMInProcess:
    """A `vllm.LLM` as an engine. `VLLMInProcess.load(model, …)` makes both.

    Args:
        llm: `vllm.LLM`, made with `logprobs_mode="processed_logprobs"` and the worker extension that `load` names.
        vocab_size: vocabulary size of the model.
        ignore_eos: generate past the model's end-of-sequence tokens where a sample names no stop tokens.
        stream_interval: decode steps between two polls; finished samples are returned at once.
        keeps_weights: asleep, it keeps its weights in host memory: not all of them are sent.
    """

    def __init__(
        self,
        llm: Any,
        vocab_size: int | None = None,
        ignore_eos: bool = False,
        stream_interval: int = 1,
        keeps_weights: bool = False,
    ) -> None:
        config = llm.llm_engine.vllm_config
        if config.model_config.logprobs_mode != "processed_logprobs":
            raise ValueError('logprobs_mode must be "processed_logprobs": pass it to vllm.LLM')
        if config.speculative_config is not None:
            raise ValueError("speculative_config: vLLM in this process must not speculate; leave it out")
        if config.scheduler_config.stream_interval != 1:
            raise ValueError("stream_interval of vLLM must be 1: it would drop the tokens of an aborted request")
        self._llm = llm
        self._engine = llm.llm_engine
        self._ignore_eos = ignore_eos
        self._vocab_size = vocab_size or config.model_config.get_vocab_size()
        self.capacity = Capacity(
            slots=config.scheduler_config.max_num_seqs, context_length=config.model_config.max_model_len
        )
        self.version = 0
        self.turns = DeviceTurns()
        self.name = "vLLM in this process"
        self._salt = 0
        self._stream_interval = stream_interval
        self._sleep_level = 1 if keeps_weights else 2
        self._steps_since_handout = 0
        self._numbers = itertools.count()
        self._requests: dict[str, InProcessRequest] = {}
        self._new: list[tuple[str, Any, Any]] = []
        self._chunks: list[Chunk] = []
        # The current device of CUDA is a property of a thread.
        self._thread = ThreadPoolExecutor(1, "vllm", initializer=_use_device, initargs=(_current_device(),))
        self._stepping: asyncio.Future[Advance] | None = None

    @classmethod
    def load(
        cls,
        model: str,
        *,
        ignore_eos: bool = False,
        stream_interval: int = 1,
        keeps_weights: bool = False,
        **settings: Any,
    ) -> VLLMInProcess:
        """Load `model` (directory or hub name); `settings` are passed to `vllm.LLM`."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        defaults = {
            "logprobs_mode": "processed_logprobs",
            "distributed_executor_backend": "uni",
            "worker_extension_cls": "april.engines.servers.vllm_worker.WorkerExtension",
        }
        return cls(
            LLM(model, **{**defaults, **settings}),
            ignore_eos=ignore_eos,
            stream_interval=stream_interval,
            keeps_weights=keeps_weights,
        )

    @property
    def running(self) -> int:
        return min(len(self._requests), self.capacity.slots)

    def submit(self, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self.turns.serving, f"{self.name} is {self.turns.state.value}: it takes no samples"
        sampling = sample.turn_sampling
        require_fit(sample, self.capacity.context_length, self._vocab_size, self.name)
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
            left = self._stream_interval - self._steps_since_handout
            self._stepping = asyncio.get_running_loop().run_in_executor(self._thread, self._advance, new, left)
        # A cancelled poll leaves the steps to the next one, and of several that wait the first takes their outputs.
        stepping = self._stepping
        await asyncio.wait([stepping])
        if self._stepping is stepping:
            self._stepping = None
            self._absorb(stepping.result())

    def _advance(self, new: list[tuple[str, Any, Any]], most: int) -> Advance:
        """Add requests, and run steps until a sample has finished, but at most `most`."""
        outputs: list[Any] = []
        try:
            for request_id, prompt, params in new:
                self._engine.add_request(request_id, prompt, params)
            steps = 0
            while steps < most and not any(output.finished for output in outputs):
                outputs += self._engine.step()
                steps += 1
            return Advance(outputs, steps)
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error

    def _absorb(self, advance: Advance) -> None:
        for output in advance.outputs:
            request = self._requests.get(output.request_id)
            if request is None:  # aborted
                continue
            (completion,) = output.outputs
            ids = list(completion.token_ids)
            request.token_ids += ids
            request.logprobs += [
                scored[token].logprob for token, scored in zip(ids, completion.logprobs or [], strict=True)
            ]
            if output.finished:
                del self._requests[output.request_id]
                self._hand_out(request, FINISH[completion.finish_reason])
        self._steps_since_handout += advance.steps
        if self._steps_since_handout >= self._stream_interval or not self._requests:
            self._steps_since_handout = 0
            for request in self._requests.values():
                self._hand_out(request)

    def _hand_out(self, request: InProcessRequest, finish: FinishReason | None = None) -> None:
        if request.token_ids or finish is not None:
            self._chunks.append(Chunk(request.sample_id, request.token_ids, request.logprobs, self.version, finish))
            request.token_ids, request.logprobs = [], []

    def _take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        chunks, self._chunks = parted(self._chunks, sample_ids)
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        chosen = {id for id, request in self._requests.items() if named is None or request.sample_id in named}
        running = chosen.difference(id for id, _, _ in self._new)
        self._new = [request for request in self._new if request[0] not in chosen]
        if running:  # otherwise `close` works when the interpreter exits, after threads have ended
            await self._call(self._engine.abort_request, list(running))
        if self._stepping is not None:  # steps that began before the abort have sampled for these requests
            await self._step()
        for id in chosen:
            if (request := self._requests.pop(id, None)) is not None:
                self._hand_out(request)
        if not self._requests:
            self._steps_since_handout = 0
        return self._take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Switch to policy `version`, from `Tensors` or a directory of safetensors."""
        assert not self._requests, "weights change only while nothing is in flight"
        load: dict[str, Any] = (
            {"weights_iterator": iter(weights)}
            if isinstance(weights, Tensors)
            else {"weights_path": directory_of(weights)}
        )
        with self.turns.updating():
            await self._call(self._reload, load)
        self._switch(version)

    def _switch(self, version: int) -> None:
        """Name the weights that vLLM has now."""
        self._salt += 1
        self.version = version

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1 without truncation."""
        assert self.turns.serving, f"{self.name} is {self.turns.state.value}: it takes no requests"
        assert not self._requests, "samples are in flight"
        return await self._call(self._score, list(token_ids))  # type: ignore[no-any-return]

    def _score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        salt = f"score-{next(self._numbers)}"
        prompt = {"prompt_token_ids": token_ids, "cache_salt": salt}
        self._engine.add_request(salt, prompt, params)
        scores: list[Any] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                scores = output.prompt_logprobs or scores
        return [score[token].logprob for token, score in zip(token_ids[1:], scores[1:], strict=True)]

    def _reload(self, weights: dict[str, Any]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs=weights)
        # On a CPU, vLLM computes with a copy of a tied output layer, which the reload does not refresh.
        self._llm.collective_rpc("refresh_output_layer")
        self._engine.reset_prefix_cache()

    async def sleep(self) -> None:
        """Release weights and KV cache. `llm` was made with `enable_sleep_mode`."""
        assert not self._requests, "vLLM sleeps only while nothing is in flight"
        with self.turns.to(TurnState.INTERRUPTED):
            await self._call(self._drain)
        with self.turns.to(TurnState.ASLEEP):
            await self._call(partial(self._llm.sleep, level=self._sleep_level))

    def _drain(self) -> None:
        """Complete batches that were scheduled before their requests were aborted."""
        for _ in range(DRAINING_STEPS):
            self._engine.step()

    async def wake_weights(self) -> None:
        """Allocate memory for the weights, whose values are undefined until `update_weights`."""
        with self.turns.to(TurnState.WEIGHTS_AWAKE):
            await self._call(partial(self._llm.wake_up, tags=["weights"]))

    async def wake_kv_cache(self) -> None:
        """Allocate the KV cache."""
        with self.turns.to(TurnState.SERVING):
            await self._call(partial(self._llm.wake_up, tags=["kv_cache"]))

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is held but the prefix cache, which vLLM evicts by itself."""

    async def close(self) -> None:
        await self.interrupt()
        self._thread.shutdown()


def _current_device() -> int | None:
    """Return the number of this thread's GPU; None if none is in use."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _use_device(device: int | None) -> None:
    """Let this thread compute on a GPU."""
    import torch

    if device is not None:
        torch.cuda.set_device(device)
