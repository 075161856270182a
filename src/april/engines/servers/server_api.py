"""What differs between inference servers: their paths, their requests and what they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from april.engines.servers.stream import Delta, Stream
from april.engines.weight_transfer import Receiver
from april.rollout.engine import Capacity
from april.rollout.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself.

    Args:
        capacity: samples that decode together, context length, KV tokens.
        vocab_size: ids from here on are refused before they are sent.
        label: the server's own name for the weights it holds.
    """

    capacity: Capacity
    vocab_size: int
    label: str | None = None


def local_config(model: str) -> dict[str, Any]:
    """The config of a model directory that can be read from here; empty if it cannot."""
    path = Path(model) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def has_tied_head(model: str) -> bool:
    """Whether the output layer is known to be that of the embeddings."""
    return bool(local_config(model).get("tie_word_embeddings"))


def local_vocab_size(model: str) -> int | None:
    """The vocabulary of a model directory that can be read from here; None if it cannot."""
    config = local_config(model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None


class Pausing(Protocol):
    """Servers that can be stopped where they are, streams open and KV caches kept."""

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...


class ServerAPI(Protocol):
    """How one kind of server is spoken to. It knows the server's calls, and nothing of samples under way."""

    kind: str
    """The server's name, in messages."""
    generate_path: str

    @property
    def pausing(self) -> Pausing | None:
        """None if the server cannot be frozen."""
        ...

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        """Ask the server what it can hold, and see that it was started with everything that is needed.

        Args:
            vocab_size: what the caller knows; None to find out.
        """
        ...

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        """Why the log-probabilities of these settings would not be those of the distribution tokens are drawn from,
        and what to do about it; None if they are."""
        ...

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        """The generate request; `salt` names the weights for prefix caches."""
        ...

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        """What an event (JSON) adds to a stream. Raises RequestError if it says that the request failed."""
        ...

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        """Ask the server to end these requests; it may not know them yet, so the caller asks again. False if the server
        has no such call: then closing a connection is what ends its request.

        Args:
            alone: nothing else runs there, so that a call which ends everything does.
        """
        ...

    async def load(self, version: int, weights: Any, receiver: Callable[..., Receiver]) -> None:
        """Have the server take up weights and name them `str(version)`.

        Args:
            receiver: makes a `Receiver` of everything but who it is.
        """
        ...

    async def reset_caches(self) -> None:
        """Drop what it cached under other weights."""
        ...

    async def label(self) -> str | None:
        """The server's own name for the weights it holds; None if it has none."""
        ...
