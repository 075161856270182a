"""The requests of one server's samples: a stream of server-sent events each, whatever becomes of it.

Invariants:
- a token is handed out exactly once;
- a sample has at most one stream that delivers; a stream that nobody asked to go on holds back what it still sends,
  and the sample gets it first when it is submitted again; of what was forgotten, nothing is ever handed out;
- what arrives while the server is frozen was sampled under the weights it was frozen with;
- a reader that falls behind stops the streams from being read, never the tokens from being kept;
- no task outlives `interrupt` but the streams that the server itself has frozen (`on_update="keep"`) and the last
  bytes of finished ones, and none outlives `close`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

from april.engines.chunk_queue import ChunkQueue
from april.engines.servers.client import FAILURES, HTTPClient, RequestError, describe, events, fault_of
from april.engines.servers.server_api import ServerAPI
from april.engines.servers.stall import StallWatch
from april.engines.servers.stream import Finish, Stream
from april.engines.servers.stream_interval import Interval, StreamInterval
from april.rollout.engine import Chunk, Fault, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory import Sample

log = logging.getLogger(__name__)

REST = 2**24
"""Bytes that a server may send after the end of a response, or in one event."""


class RequestOrder(NamedTuple):
    """What is asked of a server for a sample: to go on from its tokens so far (prompt included) up to the budget."""

    sample_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    budget: int

    @classmethod
    def of(cls, sample: Sample, context_length: int) -> RequestOrder:
        token_ids = array("i", sample.prompt_ids)
        for segment in sample.segments:
            token_ids.extend(
                segment.token_ids if isinstance(segment.token_ids, array) else array("i", segment.token_ids)
            )
        return cls(sample.id, token_ids, sample.sampling, sample.seed, sample.room(context_length))


class ReadingSettings(NamedTuple):
    """How a server's streams are read; see `ServerEngine`."""

    name: str
    on_update: KVPolicy
    stall_timeout: float
    patience: float
    stream_interval: Interval | StreamInterval
    backlog: int


class Requests:
    """The requests of one server.

    Args:
        http: the client they go through.
        api: what the server speaks, once it has been described.
        why: says of an error why a request failed, in a line.
    """

    def __init__(
        self,
        http: HTTPClient,
        api: ServerAPI,
        settings: ReadingSettings,
        why: Callable[[BaseException], str] = describe,
    ) -> None:
        self._http = http
        self._api = api
        self._name = settings.name
        self.vocab_size = 0
        """Token ids from here on are nonsense."""
        self._keep = settings.on_update == "keep"
        self._patience = settings.patience
        self._why = why
        # What a frozen server has not sent yet would be taken for the new weights'.
        self._interval = StreamInterval.of(1 if self._keep else settings.stream_interval)
        self._version, self._salt = 0, ""
        self._streams: dict[str, Stream] = {}
        self._frozen: dict[str, Stream] = {}
        self._dropped: dict[str, Stream] = {}
        self._held: dict[str, list[Chunk]] = {}
        self._tails: set[asyncio.Task[None]] = set()
        """Streams of finished samples that are read to their ends."""
        self._thawing: asyncio.Task[None] | None = None
        self._paused = False
        self._queue = ChunkQueue(settings.backlog)
        self._watch = StallWatch(settings.stall_timeout, lambda: bool(self._streams), self._stalled)
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]

    def __len__(self) -> int:
        """Samples in flight."""
        return len(self._streams)

    def holds(self, version: int, salt: str) -> None:
        """The server holds the weights of `version` from now on; `salt` names them for prefix caches."""
        self._version, self._salt = version, salt

    def request(self, stream: Stream) -> tuple[str, dict[str, Any]]:
        """Where the server is asked to generate, and what."""
        return self._api.generate_path, self._api.body(stream, self._salt)

    def submit(self, order: RequestOrder) -> None:
        id = order.sample_id
        if not self._streams:
            self._watch.heard()
        self._watch.start()
        if self._paused and self._thawing is None:
            self._thawing = asyncio.create_task(self._go_on(), name=f"resume {self._name}")
        frozen = self._frozen.pop(id, None)
        if frozen is not None and frozen.open:
            frozen.attached, frozen.interrupted = True, False
            self._streams[id] = frozen
            self._hand_out_held(id)
            return
        stream = Stream(
            id,
            f"{id}-{self._nonce}-{next(self._numbers)}",
            list(order.token_ids),
            order.sampling,
            order.seed,
            order.budget,
            self._version,
            self.vocab_size,
            self._interval.tokens,
            after=self._dropped.get(id),
        )
        self._streams[id] = stream
        stream.task = asyncio.create_task(self._run(stream), name=f"generate {stream.request_id}")

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._streams:
            await self._queue.ready()
        return self._queue.take()

    def _stalled(self) -> None:
        silence = f"no byte came from {self._name} for {self._watch.timeout:g} s"
        giving_up = asyncio.create_task(self._give_up(silence), name=f"give up {self._name}")
        self._tails.add(giving_up)
        giving_up.add_done_callback(self._tails.discard)

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop samples, all of them if none are named, and return what was not taken of them yet.

        A server can only be frozen as a whole: with "keep", too, those that are stopped while others go on are aborted,
        and are prefilled again when they are resumed.
        """
        if self._thawing is not None:
            await self._thawing
        named = None if sample_ids is None else set(sample_ids)
        stopped = {id: stream for id, stream in self._streams.items() if named is None or id in named}
        for stream in stopped.values():
            stream.interrupted = True
        with self._queue.drain():
            if self._keep and len(stopped) == len(self._streams):
                await self._freeze_streams()
            else:
                await self._end(stopped.values())
        for id in stopped:
            self._streams.pop(id, None)
        self._queue.wake()
        return self._queue.take(named)

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
        deadline, wait = asyncio.get_running_loop().time() + self._patience, 0.25
        while unfinished := [stream for stream in streams if stream.open]:
            try:
                async with asyncio.timeout_at(deadline):
                    if not await self._abort(unfinished):
                        await self._cancel(unfinished)
                        return
                    # A request that the server had not registered yet ignores the first abort.
                    await asyncio.wait([s.task for s in unfinished if s.task is not None], timeout=wait)
                    wait *= 2
            except FAILURES as error:
                log.warning(
                    "%s: %d requests were cut instead of aborted: %s", self._name, len(unfinished), describe(error)
                )
                await self._cancel(unfinished)

    async def _abort(self, streams: Sequence[Stream]) -> bool:
        """As `ServerAPI.abort`."""
        ours = itertools.chain(self._streams.values(), self._frozen.values(), self._dropped.values())
        alone = {stream.request_id for stream in streams}.issuperset(s.request_id for s in ours if s.open)
        return await self._api.abort([stream.request_id for stream in streams], alone)

    async def _freeze_streams(self) -> None:
        await self._cancel(stream for stream in self._streams.values() if not stream.sent)
        if not self._streams:
            return
        try:
            async with asyncio.timeout(self._patience):
                assert self._api.pausing is not None, "keep is refused without it"
                await self._api.pausing.freeze()
                self._paused = True
                await self._settle()
        except FAILURES as error:
            log.warning("%s could not be paused, its requests are cut: %s", self._name, describe(error))
            await self._cancel(self._streams.values())
        for sample_id, stream in self._streams.items():
            if stream.open:
                stream.attached, stream.frozen = False, True
                # One that has sent nothing is not worth keeping: its first token would still be of these weights, and
                # make its group older than anyone has reckoned with.
                stream.forgotten = not stream.received
                (self._dropped if stream.forgotten else self._frozen)[sample_id] = stream

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
            await self._give_up(f"{self._name} could not be resumed: {describe(error)}")
        finally:
            self._thawing = None

    async def _resume_server(self) -> None:
        self._dropped.update(self._frozen)
        self._frozen.clear()
        dropped = list(self._dropped.values())
        async with asyncio.timeout(self._patience):
            if dropped:
                await self._abort(dropped)
            await self._settle()
            for stream in [*dropped, *self._streams.values()]:
                stream.frozen = False
            for stream in self._streams.values():
                stream.version = self._version
            if self._api.pausing is not None:
                await self._api.pausing.thaw()
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
        error, fault = None, Fault.UNKNOWN
        try:
            if stream.after is not None and stream.after.task is not None:
                await asyncio.wait([stream.after.task])
            if self._catch_up(stream):
                return
            stream.sent = True
            while await self._request(stream) == "again":
                stream.renew()
        except Exception as failure:  # whatever it is, its sample is told, and nobody waits for it without end
            error, fault = f"{self._name}: {self._why(failure)}", fault_of(failure)
        finally:
            if self._streams.get(stream.sample_id) is stream:
                del self._streams[stream.sample_id]
                self._queue.wake()
        if error is not None and not stream.interrupted:
            self._deliver(stream, Chunk(stream.sample_id, (), (), stream.version, error=error, fault=fault))

    async def _request(self, stream: Stream) -> Finish:
        async with self._http.request("POST", *self.request(stream)) as response:
            if response.status != 200:
                raise RequestError.of(self.request(stream)[0], response.status, await response.text())
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
        first: tuple[float, int, int] | None = None
        async for data in content.iter_any():
            now = self._watch.heard()
            *lines, rest = (rest + data).split(b"\n")
            finish = stream.take_in(events(lines), self._api.read, self._deliver)
            first = first or (now, stream.received, stream.events)
            if finish is not None:
                began, tokens, count = first
                came = stream.received - tokens, stream.events - count
                self._interval.ended(self._name, stream.interval, *came, now - began)
                if finish == "abort" and not stream.interrupted:
                    raise RequestError("the server aborted the request")
                # The sample is done with this stream. It is read to its end, so that its connection can be used again,
                # unless the server goes on and on: then the connection is cut.
                if self._streams.get(stream.sample_id) is stream and finish != "again":
                    del self._streams[stream.sample_id]
                    self._keep_reading(stream)
                if not content.at_eof():
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
