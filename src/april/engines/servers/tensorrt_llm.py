"""TensorRT-LLM's `trtllm-serve` as an engine: token ids in and out over `/v1/completions`.

Written to its documented protocol and tested against a small server of ours that speaks it; **not yet run on its
hardware**. The server says little about itself and can do little to a request, so

- slots, context length and vocabulary have to be given;
- a request is cancelled by closing its connection: every token that arrived is kept, and what was still on its way is
  sampled again;
- weights cannot be handed over by a path: pass `load`, which reaches the server's workers in whatever way the
  deployment has (its `/update_weights` needs the Ray orchestrator and IPC handles);
- log-probabilities are those of the model's logits, so that only temperature 1 without truncation, and greedy, are
  accepted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from april.engines.servers.client import RequestError
from april.engines.servers.server import ServerEngine, ServerInfo
from april.engines.servers.stream import Delta, Finish, Stream
from april.rollout.engine import Capacity, EngineError
from april.rollout.trajectory import FinishReason, SamplingParams

FINISH: dict[str, Finish] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": "abort"}


class TensorRTLLMEngine(ServerEngine):
    """A running `trtllm-serve`. `await TensorRTLLMEngine.connect(url, slots=…, context_length=…, vocab_size=…)`.

    Args:
        slots: the server's `max_batch_size`.
        context_length: the server's `max_seq_len`.
        load: called with (version, weights) to have the server take weights up, KV cache reset included.
    """

    kind = "TensorRT-LLM"
    generate_path = "/v1/completions"

    def __init__(
        self,
        url: str,
        *,
        slots: int,
        context_length: int,
        vocab_size: int,
        load: Callable[[int, Any], Awaitable[None]] | None = None,
        **settings: Any,
    ) -> None:
        if settings.get("on_update", "recompute") != "recompute":
            raise ValueError('on_update = "keep": TensorRT-LLM cannot freeze requests; use "recompute"')
        super().__init__(url, vocab_size=vocab_size, **settings)
        self._given = Capacity(slots=slots, context_length=context_length)
        self._load_weights = load

    async def _describe(self) -> ServerInfo:
        await self._http.get("/health")
        self._model = (await self._http.get("/v1/models"))["data"][0]["id"]
        return ServerInfo(self._given, self._vocab_size, None)

    def _inexact(self, sampling: SamplingParams) -> str | None:
        plain = sampling.temperature == 1 and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
        if plain or sampling.temperature == 0:
            return None
        return "reports log-probabilities before temperature and truncation: sample at temperature 1 without them"

    def _body(self, stream: Stream) -> dict[str, Any]:
        greedy = stream.sampling.temperature == 0
        return {
            "model": self._model,
            "prompt": stream.token_ids,
            "stream": True,
            "max_tokens": stream.budget_left,
            "temperature": stream.sampling.temperature,
            "top_k": 1 if greedy else 0,
            # Another one for every request, or what follows an interrupt would be drawn with the first tokens' numbers.
            "seed": (stream.seed + len(stream.token_ids)) % 2**63,
            "stop_token_ids": list(stream.sampling.stop_token_ids),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "detokenize": False,
            "add_special_tokens": False,
            "logprobs": 1,
        }

    def _read(self, event: dict[str, Any], stream: Stream) -> Delta | None:
        if "error" in event or event.get("object") == "error":
            raise RequestError(str(event.get("error") or event.get("message")))
        if not event["choices"]:
            return None
        choice = event["choices"][0]
        reason = choice.get("finish_reason")
        if reason is not None and reason not in FINISH:
            raise RequestError(f"the request ended with {reason!r}")
        ids = choice.get("token_ids") or []
        scored = choice.get("logprobs")
        if ids and not scored:
            raise RequestError("no log-probabilities came: this version of trtllm-serve does not stream them")
        return Delta(ids, scored["token_logprobs"] if ids else (), FINISH[reason] if reason else None)

    async def _end(self, streams: Iterable[Stream]) -> None:
        await self._cancel(streams)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError("trtllm-serve has no call that aborts a request")

    async def _freeze(self) -> None:
        raise NotImplementedError("trtllm-serve cannot freeze requests")

    async def _thaw(self) -> None:
        """It was never frozen."""

    async def _load(self, version: int, weights: Any) -> None:
        if self._load_weights is None:
            raise EngineError(f"{self!r} takes no weights by path: connect with load=, which hands them over")
        await self._load_weights(version, weights)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await super().update_weights(version, weights)
        self._label = None

    async def _current_label(self) -> str | None:
        return None
