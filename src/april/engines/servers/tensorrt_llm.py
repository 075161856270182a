"""TensorRT-LLM's `trtllm-serve` as an engine: token ids in and out over `/v1/completions`.

Written to its documented protocol and tested against a small server of ours that speaks it; **not yet run on its
hardware**. The server reports little about itself and can do little to a request, so

- slots, context length and vocabulary have to be given;
- a request is cancelled by closing its connection: every token that arrived is kept, and tokens in transit are sampled
  again;
- weights cannot be handed over by a path: pass `load`, which reaches the server's workers in whatever way the
  deployment has (its `/update_weights` needs the Ray orchestrator and IPC handles);
- log-probabilities refer to the model's unscaled logits, so only temperature 1 without truncation and greedy decoding
  are accepted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from april.engines.fit import NO_IMAGES
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.sent_images import SentImages
from april.engines.servers.server import ServerEngine
from april.engines.servers.server_api import ServerInfo
from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.stream import Delta, Finish, Stream
from april.engines.weight_transfer import Receiver
from april.rollout.engine import Capacity, EngineError
from april.rollout.sampling import FinishReason, SamplingParams

FINISH: dict[str, Finish] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": "abort"}


class TRTScores(msgspec.Struct, gc=False):
    token_logprobs: list[float]


class TRTChoice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: TRTScores | None = None
    finish_reason: str | None = None


class TRTEvent(msgspec.Struct, gc=False):
    """What april reads of an event."""

    choices: list[TRTChoice] = []
    object: str | None = None
    error: Any = None
    message: str | None = None


decode = msgspec.json.Decoder(TRTEvent).decode

LoadWeights = Callable[[int, Any], Awaitable[None]]


async def connect_tensorrt_llm(
    url: str, *, slots: int, context_length: int, vocab_size: int, load: LoadWeights | None = None, **settings: Any
) -> ServerEngine:
    """Connect to a running `trtllm-serve`; see `ServerEngine` for the other settings.

    Args:
        slots: the server's `max_batch_size`.
        context_length: the server's `max_seq_len`.
        load: called with (version, weights) to have the server take weights up, KV cache reset included.
    """

    def api(http: HTTPClient) -> TensorRTLLM:
        return TensorRTLLM(http, Capacity(slots, context_length), load)

    return await ServerEngine.connect(url, api, vocab_size=vocab_size, **settings)


class TensorRTLLM:
    """What `trtllm-serve` understands."""

    kind = "TensorRT-LLM"
    generate_path = "/v1/completions"
    pausing = None
    sleeping = None
    routes: ServerRoutes | None = None
    images: SentImages | None = None

    def __init__(self, http: HTTPClient, capacity: Capacity, load: LoadWeights | None) -> None:
        self._http = http
        self._capacity = capacity
        self._load_weights = load

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        await self._http.get("/health")
        self._model = (await self._http.get("/v1/models"))["data"][0]["id"]
        return ServerInfo(self._capacity, vocab_size or 0, None)

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        plain = sampling.temperature == 1 and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
        if plain or sampling.temperature == 0:
            return None
        return "reports log-probabilities before temperature and truncation: sample at temperature 1 without them"

    def unsupported_images(self) -> str:
        return NO_IMAGES

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        raise NotImplementedError(NO_IMAGES)

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
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

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        decoded = decode(event)
        if decoded.error is not None or decoded.object == "error":
            raise RequestError(str(decoded.error or decoded.message))
        if not decoded.choices:
            return None
        choice = decoded.choices[0]
        reason = choice.finish_reason
        if reason is not None and reason not in FINISH:
            raise RequestError(f"the request ended with {reason!r}")
        ids, scores = choice.token_ids or [], choice.logprobs
        if ids and scores is None:
            raise RequestError("no log-probabilities came: this version of trtllm-serve does not stream them")
        return Delta(ids, scores.token_logprobs if scores and ids else (), FINISH[reason] if reason else None)

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        return False

    async def load(self, version: int, weights: Any, receiver: Callable[..., Receiver]) -> None:
        if self._load_weights is None:
            raise EngineError(
                f"{self.kind} at {self._http.url} takes no weights by path: connect with load=, which hands them over"
            )
        await self._load_weights(version, weights)

    async def reset_caches(self) -> None:
        """`load` has seen to it."""

    async def label(self) -> None:
        """It has no name for its weights."""
