"""vLLM over `/v1/completions`, for servers that a framework starts in a version without an API of tokens alone.

The server reports token ids as text (`token_id:17`). It aborts a request when its connection closes. Log-probabilities
are those before temperature and truncation, unless the server was started with processed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.local_model import local_vocab_size
from april.engines.servers.server_api import ServerInfo
from april.engines.servers.stream import Delta, Stream
from april.engines.servers.vllm import FINISH, sampling_settings
from april.integrations.servers import UnlabelledVLLM
from april.rollout.engine import Capacity


class CompletionLogprobs(msgspec.Struct, gc=False):
    tokens: list[str] = []
    token_logprobs: list[float] = []


class Completion(msgspec.Struct, gc=False):
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionEvent(msgspec.Struct, gc=False):
    """The part of an event that april reads."""

    choices: list[Completion] = []
    error: Any = None


decode = msgspec.json.Decoder(CompletionEvent).decode


class VLLMCompletions(UnlabelledVLLM):
    """API of vLLM's server without `--enable-scale-out`.

    Args:
        slots: requests that the server decodes together (`--max-num-seqs`).
    """

    generate_path = "/v1/completions"

    def __init__(self, http: HTTPClient, slots: int) -> None:
        super().__init__(http)
        self._slots = slots

    @property
    def pausing(self) -> None:  # type: ignore[override]
        """None: the server has no call that keeps streams open."""
        return None

    @property
    def sleeping(self) -> None:  # type: ignore[override]
        """None: the framework puts its servers to sleep."""
        return None

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        model = (await self._http.get("/v1/models"))["data"][0]
        self._model = model["id"]
        self._processed = self._speculates = False
        capacity = Capacity(slots=self._slots, context_length=model["max_model_len"])
        return ServerInfo(capacity, vocab_size or local_vocab_size(model["root"]) or 0)

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": stream.token_ids,
            "stream": True,
            "cache_salt": salt,
            **sampling_settings(stream),
            "skip_special_tokens": False,
            "return_tokens_as_token_ids": True,
        }

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        decoded = decode(event)
        if decoded.error is not None:
            raise RequestError(str(decoded.error))
        if not decoded.choices:
            return None
        (choice,) = decoded.choices
        reason, scores = choice.finish_reason, choice.logprobs or CompletionLogprobs()
        if reason is not None and reason not in FINISH:
            raise RequestError(f"the request ended with {reason!r}")
        try:
            ids = [int(token.removeprefix("token_id:")) for token in scores.tokens]
        except ValueError:
            raise RequestError(f"tokens came as text, not as ids: {scores.tokens}") from None
        return Delta(ids, scores.token_logprobs, FINISH[reason] if reason else None)

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        return False
