"""Differences between inference servers: paths, requests and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from april.engines.servers.server_routes import ServerRoutes
from april.engines.servers.stream import Delta, Stream
from april.engines.weight_transfer import Receiver
from april.rollout.engine import Capacity
from april.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from april.engines.servers.sent_images import SentImages


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server.

    Args:
        capacity: samples that decode together, context length, KV tokens.
        vocab_size: ids from here on are refused before they are sent.
        label: the server's name for its weights.
        releases_memory: whether `Sleeping.sleep` frees memory; None on CPUs, where nothing can be freed.
    """

    capacity: Capacity
    vocab_size: int
    label: str | None = None
    releases_memory: bool | None = False


class Pausing(Protocol):
    """Servers that can be paused with open streams and KV caches."""

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...


class Sleeping(Protocol):
    """Servers that can release their memory, and score tokens.

    Servers answer these calls with success whether or not any memory is released.
    """

    flag: str
    """Option of the server without which nothing is released."""
    tested: tuple[str, ...]
    """Versions with which these calls were tested, as prefixes."""

    async def version(self) -> str:
        """Return the server's version."""
        ...

    async def sleep(self) -> None:
        """Release weights and KV cache. Nothing may run on the server."""
        ...

    async def wake_weights(self) -> None: ...

    async def wake_kv_cache(self) -> None: ...

    async def prompt_logprobs(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1 without truncation.

        Args:
            salt: names the weights for prefix caches.
        """
        ...


class ServerAPI(Protocol):
    """API of one kind of server. It keeps no state of samples in flight."""

    kind: str
    """The server's name, in messages."""
    generate_path: str
    routes: ServerRoutes | None
    """Routes that requests ask for; None without router replay."""
    images: SentImages | None
    """Images of prompts; None if prompts with images are refused."""

    @property
    def pausing(self) -> Pausing | None:
        """None if the server cannot be frozen."""
        ...

    @property
    def sleeping(self) -> Sleeping | None:
        """None if the server cannot release its memory."""
        ...

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        """Read the server's capacity, and check that it was started with all required options.

        Args:
            vocab_size: the vocabulary size, if the caller knows it.
        """
        ...

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        """Return why log-probabilities would not match the distribution that tokens are drawn from, and the remedy.
        Return None if they match."""
        ...

    def unsupported_images(self) -> str | None:
        """Return why the server cannot take prompts with images, and the remedy. Return None if it can."""
        ...

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        """Return the body of a generate request; `salt` names the weights for prefix caches."""
        ...

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        """Return the fields of a generate request with images, in addition to `body`. It reads files: call it in a
        thread.

        Raises:
            ImageError: an image is missing or has changed.
        """
        ...

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        """Decode an event (JSON) of a stream. Raise RequestError if it reports a failed request."""
        ...

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        """Abort these requests. The server may not have registered them yet, so the caller repeats the call.

        Return False if the server has no such call: closing a connection then ends its request.

        Args:
            alone: no other request runs on the server, so a call that aborts all requests may be used.
        """
        ...

    async def load(self, version: int, weights: Any, receiver: Callable[..., Receiver]) -> None:
        """Load weights and label them `str(version)`.

        Args:
            receiver: makes a `Receiver`, given everything but its name, address and life.
        """
        ...

    async def reset_caches(self) -> None:
        """Drop caches of other weights."""
        ...

    async def label(self) -> str | None:
        """Return the server's name for its weights; None if it has none."""
        ...
