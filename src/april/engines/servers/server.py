"""An inference server as an engine: one stream of server-sent events per sample.

Invariants:
- a token is handed out exactly once;
- a sample has at most one stream that delivers; a stream that nobody asked to go on holds back what it still sends,
  and the sample gets it first when it is submitted again; of what was forgotten, nothing is ever handed out;
- a reader that falls behind stops the streams from being read, never the tokens from being kept;
- no task outlives `interrupt` but the streams that the server itself has frozen (`on_update="keep"`) and the last
  bytes of finished ones, and none outlives `close`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self, get_args

import aiohttp

from april.engines.chunk_queue import ChunkQueue
from april.engines.fit import require_fit
from april.engines.replica import ReplicaGoneError
from april.engines.servers.client import FAILURES, HTTPClient, RequestError, describe, events
from april.engines.servers.dialect import Dialect
from april.engines.servers.launch import Server
from april.engines.servers.stall import StallWatch
from april.engines.servers.stream import Finish, Stream
from april.engines.weights import Receiver
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.trajectory import Sample

log = logging.getLogger(__name__)

REST = 2**24
"""Bytes that a server may send after the end of a response, or in one event."""


class ServerEngine:
    """A running server. Make one with `connect_vllm`, `connect_sglang` or `connect_tensorrt_llm`.

    Args:
        url: where the server listens, `http://host:port`.
        dialect: what is spoken there, given the client to speak it with.
        on_update: what happens to unfinished samples when the weights change (see `april.rollout.engine.KVPolicy`).
        vocab_size: of the model; asked of the server, or of the model directory it names, if not given.
        stall_timeout: seconds without a byte from the server, with samples in flight, after which their requests
            are given up.
        patience: seconds that a control call, or the end of an interrupted stream, may take.
        update_timeout: seconds that taking up weights may take.
        stream_interval: tokens of a sample that the server sends together, which costs this process less for each. They
            come with an interrupt, but are lost with a connection, and are sampled again. 1 with "keep": what a frozen
            server has not sent yet would be taken for the new weights'.
        backlog: chunks kept for a slow reader before streams are left unread.
        api_key: sent as a bearer token.
        process: the server, if april started it: then its death is known, and said, at once.
    """

    def __init__(
        self,
        url: str,
        dialect: Callable[[HTTPClient], Dialect],
        *,
        on_update: KVPolicy = "recompute",
        vocab_size: int | None = None,
        stall_timeout: float = 300.0,
        patience: float = 30.0,
        update_timeout: float = 600.0,
        stream_interval: int = 1,
        backlog: int = 4096,
        api_key: str | None = None,
        process: Server | None = None,
    ) -> None:
        if on_update not in get_args(KVPolicy):
            raise ValueError(f'on_update = {on_update!r}: must be "recompute" or "keep"')
        self.url = url.rstrip("/")
        self.on_update = on_update
        self.version = 0
        self.capacity = Capacity(slots=1, context_length=1)
        self._vocab_size = vocab_size or 0
        self._label: str | None = None
        self._life = 0
        """Grows when the server may be another one than before."""
        self._salt = ""
        self._patience = patience
        self._update_timeout = update_timeout
        self._interval = 1 if on_update == "keep" else stream_interval
        self._process = process
        self._http = HTTPClient(url, connect_timeout=patience, api_key=api_key)
        self._dialect = dialect(self._http)
        if on_update == "keep" and self._dialect.pausing is None:
            raise ValueError(f'on_update = "keep": {self._dialect.kind} cannot freeze requests; use "recompute"')
        self._streams: dict[str, Stream] = {}
        self._frozen: dict[str, Stream] = {}
        self._dropped: dict[str, Stream] = {}
        self._held: dict[str, list[Chunk]] = {}
        self._tails: set[asyncio.Task[None]] = set()
        """Streams of finished samples that are read to their ends."""
        self._thawing: asyncio.Task[None] | None = None
        self._paused = False
        self._queue = ChunkQueue(backlog)
        self._watch = StallWatch(stall_timeout, lambda: bool(self._streams), self._stalled)
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]

    @classmethod
    async def connect(cls, url: str, dialect: Callable[[HTTPClient], Dialect], **settings: Any) -> Self:
        """Connect to a running server and learn what it can hold.

        Raises:
            EngineError: no server answers, or it was started without something this engine needs.
        """
        engine = cls(url, dialect, **settings)
        try:
            await engine.learn()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def learn(self) -> None:
        """Ask the server what it can hold, and see that nobody has left it paused.

        Raises:
            ReplicaGoneError: april started it, and does not start it again.
            EngineError: no server answers, or it was started without something this engine needs.
        """
        if self._process is not None and self._process.given_up:
            raise ReplicaGoneError(self._process.down)
        try:
            info = await self._dialect.describe(self._vocab_size or None)
            if (pausing := self._dialect.pausing) is not None:
                await pausing.thaw()
        except FAILURES as error:
            raise EngineError(f"no {self._dialect.kind} server answers at {self.url}: {self._why(error)}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"what answers at {self.url} is not {self._dialect.kind} as april knows it, see docs/engines.md for "
                f"the version it is written to: {describe(error)}"
            ) from error
        if not info.vocab_size:
            raise EngineError(f"{self!r}: the vocabulary of its model cannot be read from here: set vocab_size")
        self.capacity, self._vocab_size, self._label = info.capacity, info.vocab_size, info.label
        self._life += 1
        self._renew_salt()

    def _renew_salt(self) -> None:
        """Name the weights for prefix caches, in a way that nobody has used: KV of other weights is never found."""
        self._salt = f"{self._nonce}-{next(self._numbers)}"

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self._process.name if self._process else self._dialect.kind} at {self.url}"

    def __repr__(self) -> str:
        return self.name

    def _why(self, error: BaseException) -> str:
        """Why a call failed: the server's death, if it is that."""
        return (self._process and self._process.down) or describe(error)

    def request(self, stream: Stream) -> tuple[str, dict[str, Any]]:
        """Where the server is asked to generate, and what."""
        return self._dialect.generate_path, self._dialect.body(stream, self._salt)

    @property
    def running(self) -> int:
        return min(len(self._streams), self.capacity.slots)

    def submit(self, sample: Sample) -> None:
        require_fit(sample, self.capacity.context_length, self._vocab_size, self.name)
        if reason := self._dialect.inexact(sample.sampling):
            raise ValueError(f"sample {sample.id}: {self!r} {reason}")
        if not self._streams:
            self._watch.heard()
        self._watch.start()
        if self._paused and self._thawing is None:
            self._thawing = asyncio.create_task(self._go_on(), name=f"resume {self!r}")
        frozen = self._frozen.pop(sample.id, None)
        if frozen is not None and frozen.open:
            frozen.attached, frozen.interrupted = True, False
            self._streams[sample.id] = frozen
            self._hand_out_held(sample.id)
            return
        stream = Stream(
            sample.id,
            f"{sample.id}-{self._nonce}-{next(self._numbers)}",
            [*sample.prompt_ids, *sample.response_ids],
            sample.sampling,
            sample.seed,
            sample.room(self.capacity.context_length),
            self.version,
            self._vocab_size,
            self._interval,
            after=self._dropped.get(sample.id),
        )
        self._streams[sample.id] = stream
        stream.task = asyncio.create_task(self._run(stream), name=f"generate {stream.request_id}")

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._streams:
            await self._queue.ready()
        return self._queue.take()

    def _stalled(self) -> None:
        silence = f"no byte came from {self!r} for {self._watch.timeout:g} s"
        giving_up = asyncio.create_task(self._give_up(silence), name=f"give up {self!r}")
        self._tails.add(giving_up)
        giving_up.add_done_callback(self._tails.discard)

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop samples (see `Engine.interrupt`). A server can only be frozen as a whole: with "keep", too, those that
        are stopped while others go on are aborted, and are prefilled again when they are resumed."""
        if self._thawing is not None:
            await self._thawing
        named = None if sample_ids is None else set(sample_ids)
        stopped = {id: stream for id, stream in self._streams.items() if named is None or id in named}
        for stream in stopped.values():
            stream.interrupted = True
        with self._queue.drain():
            if self.on_update == "keep" and len(stopped) == len(self._streams):
                await self._freeze_streams()
            else:
                await self._end(stopped.values())
        for id in stopped:
            self._streams.pop(id, None)
        self._queue.wake()
        return self._queue.take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`: from a directory of safetensors the server can see, or by a `Broadcast`.

        Raises:
            EngineError: the server did not take the weights up; which it holds now is not known.
            ValueError: there are no weights there.
        """
        assert not self._streams, "weights change only while nothing is in flight"
        try:
            async with asyncio.timeout(self._update_timeout):
                receiver = functools.partial(Receiver, self.name, self.url, self._life)
                await self._dialect.load(version, weights, receiver)
                if self.on_update == "recompute":
                    await self._dialect.reset_caches()
                self._label = await self._dialect.label()
        except (*FAILURES, RuntimeError) as error:
            raise EngineError(f"{self!r} did not take up weights {version}: {self._why(error)}") from error
        self.version = version
        self._renew_salt()
        for stream in self._frozen.values():
            stream.version = version

    async def check(self) -> None:
        """See that the server lives and holds the weights it was last given.

        Raises:
            EngineError: it does not answer, or it has been restarted or given other weights since.
        """
        try:
            async with asyncio.timeout(self._patience):
                await self._http.get("/health")
                label = await self._dialect.label()
        except FAILURES as error:
            raise EngineError(f"{self!r} is not well: {self._why(error)}") from error
        if label != self._label:
            raise EngineError(f"{self!r} holds weights {label!r} where {self._label!r} were given to it")

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Do not go on with the frozen requests of these samples, but start again from their tokens."""
        known = {*self._frozen, *self._dropped, *self._held}
        for sample_id in known if sample_ids is None else known.intersection(sample_ids):
            self._held.pop(sample_id, None)
            if (stream := self._frozen.pop(sample_id, None)) is not None:
                self._dropped[sample_id] = stream
            if (stream := self._dropped.get(sample_id)) is not None:
                stream.forgotten = True

    async def close(self) -> None:
        with suppress(*FAILURES):
            if self._thawing is not None:
                await self._thawing
            if self._paused:
                await self._resume_server()
        await self.abandon()
        self._watch.stop()
        await self._http.close()

    async def abandon(self) -> list[Chunk]:
        """Cut every connection without a word to the server, and return what had arrived."""
        with self._queue.drain():
            if self._thawing is not None:
                self._thawing.cancel()
                await asyncio.gather(self._thawing, return_exceptions=True)
            for stream in self._streams.values():
                stream.interrupted = True
            await self._cancel([*self._streams.values(), *self._frozen.values(), *self._dropped.values()])
            for tail in self._tails:
                tail.cancel()
            await asyncio.gather(*self._tails, return_exceptions=True)
            self._streams.clear()
            self._frozen.clear()
            self._dropped.clear()
            self._paused, self._thawing = False, None
        return self._queue.take()

    async def _cancel(self, streams: Iterable[Stream]) -> None:
        tasks = [stream.task for stream in streams if stream.task is not None and not stream.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, streams: Iterable[Stream]) -> None:
        """Abort requests and read their streams to the end, where the server says what it had sampled."""
        streams = list(streams)
        await self._cancel(stream for stream in streams if not stream.sent)
        deadline = asyncio.get_running_loop().time() + self._patience
        while unfinished := [stream for stream in streams if stream.open]:
            try:
                async with asyncio.timeout_at(deadline):
                    if not await self._dialect.abort([stream.request_id for stream in unfinished]):
                        await self._cancel(unfinished)
                        return
                    # A request that the server had not registered yet ignores the first abort.
                    await asyncio.wait([s.task for s in unfinished if s.task is not None], timeout=0.25)
            except FAILURES as error:
                log.warning("%r: %d requests were cut instead of aborted: %s", self, len(unfinished), describe(error))
                await self._cancel(unfinished)

    async def _freeze_streams(self) -> None:
        await self._cancel(stream for stream in self._streams.values() if not stream.sent)
        if not self._streams:
            return
        try:
            async with asyncio.timeout(self._patience):
                assert self._dialect.pausing is not None, "keep is refused without it"
                await self._dialect.pausing.freeze()
                self._paused = True
                await self._settle()
        except FAILURES as error:
            log.warning("%r could not be paused, its requests are cut: %s", self, describe(error))
            await self._cancel(self._streams.values())
        for sample_id, stream in self._streams.items():
            if stream.open:
                stream.attached = False
                self._frozen[sample_id] = stream

    async def _settle(self) -> None:
        """Wait until what was on its way when the server stopped has arrived."""
        received = -1
        while received != (now := sum(stream.received for stream in self._streams.values())):
            received = now
            await asyncio.sleep(0.02)

    async def _go_on(self) -> None:
        """Resume a frozen server, without the requests that nobody asked to go on."""
        await asyncio.sleep(0)
        try:
            await self._resume_server()
        except FAILURES as error:
            await self._give_up(f"{self!r} could not be resumed: {describe(error)}")
        finally:
            self._thawing = None

    async def _resume_server(self) -> None:
        self._dropped.update(self._frozen)
        self._frozen.clear()
        dropped = list(self._dropped.values())
        async with asyncio.timeout(self._patience):
            if dropped:
                await self._dialect.abort([stream.request_id for stream in dropped])
            if self._dialect.pausing is not None:
                await self._dialect.pausing.thaw()
            self._paused = False
        await self._end(dropped)
        self._dropped.clear()

    async def _give_up(self, reason: str) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        await self._cancel(streams)
        for stream in streams:
            self._queue.put(Chunk(stream.sample_id, (), (), stream.version, error=reason))

    async def _run(self, stream: Stream) -> None:
        error = None
        try:
            if stream.after is not None and stream.after.task is not None:
                await asyncio.wait([stream.after.task])
            if self._catch_up(stream):
                return
            stream.sent = True
            while await self._request(stream) == "again":
                stream.renew()
        except (*FAILURES, ValueError, LookupError, TypeError) as failure:
            error = f"{self!r}: {self._why(failure)}"
        finally:
            if self._streams.get(stream.sample_id) is stream:
                del self._streams[stream.sample_id]
                self._queue.wake()
        if error is not None and not stream.interrupted:
            self._deliver(stream, Chunk(stream.sample_id, (), (), stream.version, error=error))

    async def _request(self, stream: Stream) -> Finish:
        async with self._http.request("POST", *self.request(stream)) as response:
            if response.status != 200:
                raise RequestError(f"HTTP {response.status}: {(await response.text())[:500]}")
            return await self._follow(stream, response.content)

    def _catch_up(self, stream: Stream) -> bool:
        """Hand out what was held back of the sample and go on from there; True if it had finished."""
        late = self._hand_out_held(stream.sample_id)
        for chunk in late:
            stream.token_ids.extend(chunk.token_ids)
            stream.budget -= len(chunk.token_ids)
        return any(chunk.finish is not None for chunk in late)

    def _hand_out_held(self, sample_id: str) -> list[Chunk]:
        held = self._held.pop(sample_id, [])
        for chunk in held:
            self._queue.put(chunk)
        return held

    def _keep_reading(self, stream: Stream) -> None:
        assert stream.task is not None
        self._tails.add(stream.task)
        stream.task.add_done_callback(self._tails.discard)

    async def _follow(self, stream: Stream, content: aiohttp.StreamReader) -> Finish:
        """Read a stream to its end. All events that arrived together become one chunk."""
        rest = b""
        async for data in content.iter_any():
            self._watch.heard()
            *lines, rest = (rest + data).split(b"\n")
            finish = stream.take_in(events(lines), self._dialect.read, self._deliver)
            if finish is not None:
                if finish == "abort" and not stream.interrupted:
                    raise RequestError("the server aborted the request")
                # The sample is done with this stream. It is read to its end, so that its connection can be used again,
                # unless the server goes on and on: then the connection is cut.
                if self._streams.get(stream.sample_id) is stream and finish != "again":
                    del self._streams[stream.sample_id]
                    self._keep_reading(stream)
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with asyncio.timeout(self._patience):
                        left = REST
                        while left > 0 and (more := await content.read(left)):
                            left -= len(more)
                return finish
            if len(rest) > REST:
                raise RequestError(f"an event of more than {REST} bytes came")
            if self._queue.full:
                await self._queue.space()
        raise RequestError(f"the stream broke off after {stream.received} tokens")

    def _deliver(self, stream: Stream, chunk: Chunk) -> None:
        if stream.attached:
            self._queue.put(chunk)
        elif chunk.error is None and not stream.forgotten:
            self._held.setdefault(stream.sample_id, []).append(chunk)
