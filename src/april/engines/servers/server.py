"""An inference server as an engine: capacity, weights and health.

Invariants:
- weights change only while nothing is in flight, and every request names the weights it is made under;
- no request of any kind runs on a server that sleeps (`device_turns.py`);
- requests of samples belong to `requests.py`, in this process or, through `stream_reader.py`, in another.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from april.engines.device_turns import DeviceTurns, TurnState
from april.engines.fit import require_fit
from april.engines.replica import ReplicaGoneError
from april.engines.servers.client import FAILURES, HTTPClient, call_limit, describe
from april.engines.servers.freezable_requests import requests_of
from april.engines.servers.launch import Server
from april.engines.servers.requests import ReadingSettings, RequestOrder, Requests
from april.engines.servers.server_api import ServerAPI, Sleeping
from april.engines.servers.sleep import require_sleep
from april.engines.servers.stream_interval import Interval, StreamInterval
from april.engines.servers.stream_reader import RemoteRequests, StreamReader
from april.engines.weight_transfer import Receiver
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.patience import patient_timeout
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample


class ServerEngine:
    """A running server. Make one with `connect_vllm`, `connect_sglang` or `connect_tensorrt_llm`.

    Args:
        url: address of the server, `http://host:port`.
        api: makes the server's API from its HTTP client.
        on_update: treatment of unfinished samples at a weight update (see `april.rollout.engine.KVPolicy`).
        vocab_size: of the model; asked of the server, or of the model directory it names, if not given.
        stall_timeout: seconds without a byte from the server, with samples in flight, after which their requests
            are given up.
        patience: seconds that a control call, or the end of an interrupted stream, may take.
        update_timeout: seconds that taking up weights may take.
        stream_interval: tokens of a sample that the server sends together; more tokens per event cost this machine
            less. Tokens that were not sent yet arrive with an interrupt, but are lost with a connection, and are
            sampled again. "auto": the number that a stream samples in a second; a `StreamInterval` object keeps its
            measurements across connections. Always 1 with "keep": tokens that a frozen server has not sent yet would be
            taken for tokens of the new weights.
        backlog: chunks kept for a slow reader before streams are left unread.
        api_key: sent as a bearer token.
        process: the server, if april started it: its death is then detected and reported at once.
        shares_devices: whether it has to release its memory for the trainer.
        gpus: UUIDs of its GPUs as torch prints them, by rank, if its process is elsewhere; empty if unknown.
        sampling: sampling parameters that samples will have; a server that does not support them is refused.
    """

    def __init__(
        self,
        url: str,
        api: Callable[[HTTPClient], ServerAPI],
        *,
        on_update: KVPolicy = "recompute",
        vocab_size: int | None = None,
        stall_timeout: float = 300.0,
        patience: float = 30.0,
        update_timeout: float = 600.0,
        stream_interval: Interval | StreamInterval = 1,
        backlog: int = 4096,
        api_key: str | None = None,
        process: Server | None = None,
        shares_devices: bool = False,
        gpus: tuple[str, ...] = (),
        sampling: SamplingParams | None = None,
    ) -> None:
        if on_update not in ("recompute", "keep"):  # servers verify no drafts
            raise ValueError(f'on_update = {on_update!r}: must be "recompute" or "keep"')
        self.url = url.rstrip("/")
        self.on_update = on_update
        self.version = 0
        self.turns = DeviceTurns()
        self.capacity = Capacity(slots=1, context_length=1)
        self._vocab_size = vocab_size or 0
        self._label: str | None = None
        self._life = 0
        """Increases when the server may have been replaced."""
        self._patience = patience
        self._update_timeout = update_timeout
        self._process = process
        self._shares_devices = shares_devices
        self._gpus = process.how.gpus if process else gpus
        self._sampling = sampling
        self._http = HTTPClient(url, patience, api_key)
        self._api = api(self._http)
        if on_update == "keep" and self._api.pausing is None:
            raise ValueError(f'on_update = "keep": {self._api.kind} cannot freeze requests; use "recompute"')
        self._reading = ReadingSettings(self.name, on_update, stall_timeout, patience, stream_interval, backlog)
        self.requests: Requests | RemoteRequests = requests_of(self._http, self._api, self._reading, self._why)
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]

    @classmethod
    async def connect(cls, url: str, api: Callable[[HTTPClient], ServerAPI], **settings: Any) -> Self:
        """Connect to a running server and read its capacity.

        Raises:
            EngineError: no server answers, or it was started without something this engine needs.
        """
        engine = cls(url, api, **settings)
        try:
            await engine.refresh()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def refresh(self) -> None:
        """Read the server's capacity, and resume it if it was left paused.

        Raises:
            ReplicaGoneError: april started it, and does not start it again.
            EngineError: no server answers, or it was started without something this engine needs.
        """
        if self._process is not None and self._process.given_up:
            raise ReplicaGoneError(self._process.down)
        try:
            info = await self._api.describe(self._vocab_size or None)
            if self._shares_devices:
                await require_sleep(self.name, self._api.sleeping, info)
            if (pausing := self._api.pausing) is not None:
                await pausing.thaw()
        except FAILURES as error:
            raise EngineError(f"no {self._api.kind} server answers at {self.url}: {self._why(error)}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"what answers at {self.url} is not {self._api.kind} as april knows it, see docs/engines.md for "
                f"the version it is written to: {describe(error)}"
            ) from error
        if not info.vocab_size:
            raise EngineError(f"{self!r}: the vocabulary of its model cannot be read from here: set vocab_size")
        if self._sampling is not None and (reason := self._api.unsupported_sampling(self._sampling)):
            raise EngineError(f"{self!r} {reason}")
        if (images := self._api.images) is not None and images.expected and (reason := self._api.unsupported_images()):
            raise EngineError(f"{self!r} {reason}")
        self.capacity, self._vocab_size, self._label = info.capacity, info.vocab_size, info.label
        self._life += 1
        self.turns.restarted()
        self.requests.vocab_size = info.vocab_size
        if isinstance(self.requests, RemoteRequests):
            await self.requests.open()
        self._name_weights()

    async def use_reader(self, reader: StreamReader) -> None:
        """Make another process read this server's streams. Nothing may be in flight.

        Raises:
            EngineError: the process does not start.
        """
        assert not self.requests, "requests stay where they began"
        await self.requests.close()
        self.requests = RemoteRequests(reader, self._http, self._api, self._reading, self._why)
        self.requests.vocab_size = self._vocab_size
        await self.requests.open()
        self._name_weights()

    def _name_weights(self) -> None:
        """Name the weights for prefix caches by a unique salt: KV of other weights is never found."""
        self.requests.set_weights(self.version, f"{self._nonce}-{next(self._numbers)}")

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self._process.name if self._process else self._api.kind} at {self.url}"

    @property
    def place(self) -> str:
        """Its machine, for messages."""
        return urlsplit(self.url).hostname or self.url

    def __repr__(self) -> str:
        return self.name

    def _why(self, error: BaseException) -> str:
        """Describe why a call failed: by the server's death, if it died."""
        return (self._process and self._process.down) or describe(error)

    @property
    def running(self) -> int:
        return min(len(self.requests), self.capacity.slots)

    @property
    def _sleeping(self) -> Sleeping:
        assert self._api.sleeping is not None, "a server that cannot sleep is refused when it is connected"
        return self._api.sleeping

    def submit(self, sample: Sample) -> None:
        assert self.turns.serving, f"{self!r} is {self.turns.state.value}: it takes no samples"
        no_images = self._api.unsupported_images() if sample.features else None
        require_fit(sample, self.capacity.context_length, self._vocab_size, self.name, no_images)
        if reason := self._api.unsupported_sampling(sample.turn_sampling):
            raise ValueError(f"sample {sample.id}: {self!r} {reason}")
        self.requests.submit(RequestOrder.of(sample, self.capacity.context_length))

    async def poll(self) -> list[Chunk]:
        return await self.requests.poll()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop samples (see `Engine.interrupt` and `Requests.interrupt`)."""
        return await self.requests.interrupt(sample_ids)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Do not resume the frozen requests of these samples."""
        self.requests.forget(sample_ids)

    async def abandon(self) -> list[Chunk]:
        """Close every connection without a call to the server, and return the tokens that had arrived."""
        return await self.requests.abandon()

    async def close(self) -> None:
        await self.requests.close()
        await self._http.close()

    async def kill(self) -> None:
        """Kill the server's process, if april started it."""
        if self._process is not None:
            await self._process.kill()

    async def sleep(self) -> None:
        """Release the server's memory (see `SleepingEngine`)."""
        with self.turns.to(TurnState.INTERRUPTED):
            assert not self.requests, "samples are in flight"
        await self._turn(TurnState.ASLEEP, self._sleeping.sleep)

    async def wake_weights(self) -> None:
        await self._turn(TurnState.WEIGHTS_AWAKE, self._sleeping.wake_weights)

    async def wake_kv_cache(self) -> None:
        await self._turn(TurnState.SERVING, self._sleeping.wake_kv_cache)

    async def _turn(self, state: TurnState, call: Callable[[], Awaitable[None]]) -> None:
        try:
            with self.turns.to(state):
                async with patient_timeout(self._update_timeout):
                    with call_limit(self._update_timeout):
                        await call()
        except FAILURES as error:
            raise EngineError(f"{self!r} did not become {state.value}: {self._why(error)}") from error

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first (see `SleepingReplica`)."""
        assert self.turns.serving, f"{self!r} is {self.turns.state.value}: it takes no requests"
        try:
            # The first requests after a start or a change of the weights may compile kernels.
            async with patient_timeout(self._update_timeout):
                with call_limit(self._update_timeout):
                    return await self._sleeping.prompt_logprobs(token_ids, f"{self._nonce}-{next(self._numbers)}")
        except (*FAILURES, LookupError, TypeError) as error:
            raise EngineError(f"{self!r} did not score tokens: {self._why(error)}") from error

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`: from a directory of safetensors the server can see, or by a `Broadcast`.

        Raises:
            EngineError: the server did not take the weights up; which it holds now is not known.
            ValueError: there are no weights there.
        """
        assert not self.requests, "weights change only while nothing is in flight"
        try:
            async with patient_timeout(self._update_timeout):
                # The limit of one call is `patience` otherwise, and loading takes longer.
                with call_limit(self._update_timeout), self.turns.updating():
                    await self._load(version, weights)
        except (*FAILURES, RuntimeError) as error:
            # torch raises RuntimeError if a collective fails.
            raise EngineError(f"{self!r} did not take up weights {version}: {self._why(error)}") from error
        self.version = version
        self._name_weights()

    async def _load(self, version: int, weights: Any) -> None:
        receiver = functools.partial(Receiver, self.name, self.url, self._life, gpus=self._gpus)
        await self._api.load(version, weights, receiver)
        # With "keep", frozen requests need their KV caches. A server that sleeps has none.
        if self.on_update == "recompute" and self.turns.serving:
            await self._api.reset_caches()
        # Read back, because not all servers take april's label; `check` compares with it.
        self._label = await self._api.label()

    async def check(self) -> None:
        """Check that the server is alive and holds the weights that it was last given.

        Raises:
            EngineError: it does not answer, or it has been restarted or given other weights since.
        """
        try:
            async with patient_timeout(self._patience):
                if self.turns.serving:  # SGLang's health check runs a request
                    await self._http.get("/health")
                label = await self._api.label()
        except FAILURES as error:
            raise EngineError(f"{self!r} is not well: {self._why(error)}") from error
        if not self.turns.serving:
            return
        if isinstance(self.requests, RemoteRequests):
            await self.requests.check()
        if label != self._label:
            raise EngineError(f"{self!r} holds weights {label!r} where {self._label!r} were given to it")
