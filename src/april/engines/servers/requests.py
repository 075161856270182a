"""Requests of one server's samples: one stream of server-sent events each.

Invariants:
- every token is handed out exactly once;
- a sample has at most one stream whose tokens are handed out;
- a slow reader stops the streams from being read (back-pressure), and loses no token;
- at most `IMAGE_REQUESTS` bodies with images are in memory, and none while its response is read;
- no task outlives `interrupt`, except the ends of responses whose samples have finished, and none outlives `close`.

    submit ──> WAITING ──request sent──> RUNNING ──finish or error──> handed out, the sample is no longer in flight
                  └──────interrupt────────> │ └──interrupt──> STOPPING ──aborted by the server──> the stream has ended

`freezable_requests.py` adds the states of `on_update = "keep"`.
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
import msgspec

from april.engines.chunk_queue import ChunkQueue
from april.engines.servers.client import FAILURES, HTTPClient, RequestError, describe, events, fault_of
from april.engines.servers.server_api import ServerAPI
from april.engines.servers.stall import StallWatch
from april.engines.servers.stream import Finish, Stream, StreamState
from april.engines.servers.stream_interval import Interval, StreamInterval
from april.rollout.engine import Chunk, Fault, KVPolicy
from april.rollout.patience import patient_timeout
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

MAX_EVENT_BYTES = 2**24
"""Bytes that a server may send in one event, or after the end of a response."""
BEHIND_STOPS = 8
"""Tokens that a server may draw behind a stop string before they are seen."""
MAX_ROUTES_BYTES = 2**30
"""Bytes that a server may send in one event with routes: kilobytes a token."""
IMAGE_REQUESTS = 8
"""Requests with images that are sent to a server at a time: each body may hold hundreds of megabytes of pixels."""
FIRST_ABORT_WAIT = 0.25
"""Seconds after which a request that an abort has not ended is aborted again; they double each time."""


class RequestOrder(NamedTuple):
    """Parameters of a request: continue a sample from its tokens so far (prompt included), up to its budget."""

    sample_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    budget: int
    interval: int | None = None
    """Most tokens that the server may send together; None: the server's stream interval decides alone."""
    routes_from: int = 0
    """First token whose routes are missing."""
    features: tuple[Feature, ...] = ()
    """Images of the prompt."""

    @classmethod
    def of(cls, sample: Sample, context_length: int) -> RequestOrder:
        token_ids = array("i", sample.prompt_ids)
        for segment in sample.segments:
            token_ids.extend(
                segment.token_ids if isinstance(segment.token_ids, array) else array("i", segment.token_ids)
            )
        interval = BEHIND_STOPS if sample.stop_strings else None
        known = 0 if sample.routes is None else sample.routes.length
        room = sample.room(context_length)
        return cls(sample.id, token_ids, sample.turn_sampling, sample.seed, room, interval, known, sample.features)


class ReadingSettings(NamedTuple):
    """How a server's streams are read; see `ServerEngine`."""

    name: str
    on_update: KVPolicy
    stall_timeout: float
    patience: float
    stream_interval: Interval | StreamInterval
    backlog: int


class Requests:
    """Requests of one server.

    Args:
        http: client that sends them.
        api: the server's API, after it has been described.
        settings: how streams are read.
        why: describes an error in one line.
        owns_client: whether `close` closes the client.
    """

    def __init__(
        self,
        http: HTTPClient,
        api: ServerAPI,
        settings: ReadingSettings,
        why: Callable[[BaseException], str] = describe,
        owns_client: bool = False,
    ) -> None:
        self._http = http
        self._api = api
        self._name = settings.name
        self.vocab_size = 0
        """Token ids from here on are invalid."""
        self._patience = settings.patience
        self._why = why
        self._owns_client = owns_client
        self._interval = StreamInterval.of(settings.stream_interval)
        self._version, self._salt = 0, ""
        self._streams: dict[str, Stream] = {}
        """Streams of the samples in flight."""
        self._background: set[asyncio.Task[None]] = set()
        """Streams of finished samples that are read to their ends, and stalled streams that are given up."""
        self._queue = ChunkQueue(settings.backlog)
        self._watch = StallWatch(
            settings.stall_timeout, lambda: bool(self._streams), lambda: not self._queue.full, self._stalled
        )
        self._sending_images = asyncio.Semaphore(IMAGE_REQUESTS)
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]

    def __len__(self) -> int:
        """Samples in flight."""
        return len(self._streams)

    def set_weights(self, version: int, salt: str) -> None:
        """Record that the server holds the weights of `version` from now on; `salt` names them for prefix caches."""
        self._version, self._salt = version, salt

    def request(self, stream: Stream) -> tuple[str, dict[str, Any]]:
        """Return path and body of a stream's request."""
        return self._api.generate_path, self._api.body(stream, self._salt)

    def _with_images(self, stream: Stream, body: dict[str, Any]) -> bytes:
        """Return a body with the prompt's images, encoded. Called in a thread: files are read."""
        return msgspec.json.encode(body | self._api.image_fields(stream, self._salt))

    def submit(self, order: RequestOrder) -> None:
        self._expect_data()
        self._start(order)

    def _expect_data(self) -> None:
        # Time without any request is no stall.
        if not self._streams:
            self._watch.arrived()
        self._watch.start()

    def _start(self, order: RequestOrder, after: Stream | None = None) -> None:
        stream = Stream(
            order.sample_id,
            # Unique across processes: a server may still run requests of an earlier run.
            f"{order.sample_id}-{self._nonce}-{next(self._numbers)}",
            list(order.token_ids),
            order.sampling,
            order.seed,
            order.budget,
            self._version,
            self.vocab_size,
            self._interval.tokens if order.interval is None else min(self._interval.tokens, order.interval),
            after=after,
            routes_from=order.routes_from,
            features=order.features,
        )
        self._streams[stream.sample_id] = stream
        stream.task = asyncio.create_task(self._run(stream), name=f"generate {stream.request_id}")

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._streams:
            await self._queue.ready()
        return self._queue.take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop samples, all of them if none are named, and return their tokens that were not handed out yet."""
        named = None if sample_ids is None else set(sample_ids)
        stopped = {id: stream for id, stream in self._streams.items() if named is None or id in named}
        for stream in stopped.values():
            if stream.state is StreamState.RUNNING:
                stream.state = StreamState.STOPPING
        # The streams are read to their ends while no consumer takes chunks, so they must not wait for space.
        with self._queue.drain():
            await self._cancel(stream for stream in stopped.values() if stream.state is StreamState.WAITING)
            await self._stop(stopped)
        for id in stopped:
            self._streams.pop(id, None)
        self._queue.wake()
        return self._queue.take(named)

    async def _stop(self, streams: dict[str, Stream]) -> None:
        await self._abort(streams.values())

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is kept for samples that are not in flight."""

    async def close(self) -> None:
        await self.abandon()
        self._watch.stop()
        if self._owns_client:
            await self._http.close()

    async def abandon(self) -> list[Chunk]:
        """Close every connection without a call to the server, and return the tokens that had arrived."""
        with self._queue.drain():
            for stream in self._open():
                if stream.state is StreamState.RUNNING:
                    stream.state = StreamState.STOPPING
            await self._cancel(self._open())
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._streams.clear()
        return self._queue.take()

    def _open(self) -> list[Stream]:
        """Return all streams that have not ended."""
        return [stream for stream in self._streams.values() if stream.open]

    async def _cancel(self, streams: Iterable[Stream]) -> None:
        """End streams by closing their connections."""
        tasks = [stream.task for stream in streams if stream.task is not None and not stream.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _abort(self, streams: Iterable[Stream]) -> None:
        """Abort requests and read their streams to the end: the last events contain tokens not sent before."""
        streams = list(streams)
        wait = FIRST_ABORT_WAIT
        try:
            async with patient_timeout(self._patience):
                while unfinished := [stream for stream in streams if stream.open]:
                    if not await self._request_abort(unfinished):
                        await self._cancel(unfinished)
                        return
                    # A request that the server had not registered yet ignores the first abort.
                    await asyncio.wait([s.task for s in unfinished if s.task is not None], timeout=wait)
                    wait *= 2
        except FAILURES as error:
            unfinished = [stream for stream in streams if stream.open]
            log.warning("%s: %d requests were cut instead of aborted: %s", self._name, len(unfinished), describe(error))
            await self._cancel(unfinished)

    async def _request_abort(self, streams: Sequence[Stream]) -> bool:
        """As `ServerAPI.abort`."""
        ids = [stream.request_id for stream in streams]
        alone = set(ids).issuperset(stream.request_id for stream in self._open())
        return await self._api.abort(ids, alone)

    def _stalled(self) -> None:
        silence = f"no byte came from {self._name} for {self._watch.timeout:g} s"
        self._in_background(asyncio.create_task(self._fail(silence), name=f"fail {self._name}"))

    def _in_background(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _fail(self, reason: str) -> None:
        """Fail the requests of all samples in flight."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:  # before anything is awaited: a sample is in flight, or its error is in the queue
            self._queue.put(Chunk(stream.sample_id, (), (), stream.version, error=reason))
        await self._cancel(streams)

    async def _run(self, stream: Stream) -> None:
        """Send a stream's request and read its response. The task of the stream."""
        error, fault = None, Fault.UNKNOWN
        try:
            if await self._may_send(stream):
                while await self._request(stream) == "again":
                    stream.renew()
        except Exception as failure:  # any exception: the caller must not wait for a sample whose stream has ended
            fault = fault_of(failure)
            error = str(failure) if fault is Fault.INPUT else f"{self._name}: {self._why(failure)}"
        finally:
            self._ended(stream)
        # In any other state this process has ended the stream, and its error is no failure of the request.
        if error is not None and stream.state in (StreamState.WAITING, StreamState.RUNNING):
            self._queue.put(Chunk(stream.sample_id, (), (), stream.version, error=error, fault=fault))

    async def _may_send(self, stream: Stream) -> bool:
        """Wait until a stream's request may be sent. Return False if the sample needs none."""
        return True

    def _ended(self, stream: Stream) -> None:
        """End a stream's sample, if the sample is still in flight on it."""
        if self._streams.get(stream.sample_id) is stream:
            del self._streams[stream.sample_id]
            self._queue.wake()

    async def _request(self, stream: Stream) -> Finish:
        async with await self._send(stream) as response:
            if response.status != 200:
                raise RequestError.of(response.url.path, response.status, await response.text())
            return await self._read(stream, response.content)

    async def _send(self, stream: Stream) -> aiohttp.ClientResponse:
        """Send a stream's request and return the response at its first byte: the body is dropped then."""
        if not stream.features:
            path, body = self.request(stream)
            return await self._post(stream, path, body)
        async with self._sending_images:
            path, body = self.request(stream)
            return await self._post(stream, path, await asyncio.to_thread(self._with_images, stream, body))

    async def _post(self, stream: Stream, path: str, body: dict[str, Any] | bytes) -> aiohttp.ClientResponse:
        if stream.state is StreamState.WAITING:
            stream.state = StreamState.RUNNING
        response: aiohttp.ClientResponse = await self._http.request("POST", path, body)
        return response

    async def _read(self, stream: Stream, content: aiohttp.StreamReader) -> Finish:
        """Read a response to its end. All events that arrived together become one chunk."""
        rest = b""
        first: tuple[float, int, int] | None = None
        async for data in content.iter_any():
            now = self._watch.arrived()
            *lines, rest = (rest + data).split(b"\n")
            finish = stream.take_in(events(lines), self._api.read, self._deliver, self._labelled)
            # The speed counts from the first event: the time before it is queueing and prefill.
            first = first or (now, stream.received, stream.events)
            if finish is not None:
                since, tokens, count = first
                measured = stream.received - tokens, stream.events - count, now - since
                self._interval.ended(self._name, stream.interval, *measured)
                if finish == "abort" and stream.state is StreamState.RUNNING:
                    raise RequestError("the server aborted the request")
                # The sample is no longer in flight, so `interrupt` must not wait for the rest of the response.
                if finish != "again" and self._streams.get(stream.sample_id) is stream:
                    self._ended(stream)
                    assert stream.task is not None
                    self._in_background(stream.task)
                await self._read_rest(content)
                return finish
            most = MAX_EVENT_BYTES if self._api.routes is None else MAX_ROUTES_BYTES
            if len(rest) > most:
                raise RequestError(f"an event of more than {most} bytes came")
            if self._queue.full:
                await self._queue.space()
                self._watch.arrived()
        raise RequestError(f"the stream broke off after {stream.received} tokens")

    async def _read_rest(self, content: aiohttp.StreamReader) -> None:
        """Read the end of a response, so that its connection can be used again, unless it is too long."""
        if content.at_eof():
            return
        with suppress(aiohttp.ClientError, TimeoutError):
            async with patient_timeout(self._patience):
                left = MAX_EVENT_BYTES
                while left > 0 and (more := await content.read(left)):
                    left -= len(more)

    @property
    def _labelled(self) -> bool:
        """Whether the server's labels name the weights that sampled the tokens."""
        return True

    def _deliver(self, stream: Stream, chunk: Chunk) -> None:
        self._queue.put(chunk)
