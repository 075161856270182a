"""A process that reads the streams of several servers, so that the driver sees packed chunks and never HTTP.

One driver cannot read the streams of many GPU servers: a core takes in what a few of them sample. So processes of their
own (`intake_process.py`) hold the connections, parse the events and check them, and send chunks over a socket, packed.
Weights, health and everything else about a server stay in the driver.

Invariants:
- what a process has sent is handed out in the order in which it was sent, and what it sent for a sample before it
  answers that the sample is interrupted is handed out by that interrupt;
- a driver that falls behind leaves the socket unread, and the processes their streams; while it interrupts, it reads;
- a process that dies, or hangs and is killed, takes with it nothing but what it had not sent: the engines whose streams
  it read fail as engines do, and start it again when they are asked to come back, at most `restarts` times in a row.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from april.engines.calls import Calls
from april.engines.chunk_queue import ChunkQueue
from april.engines.linked_process import LinkedProcess
from april.engines.packed import PackedChunks, unpack
from april.engines.replica import ReplicaGoneError
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.launch import RESTARTS, STEADY
from april.engines.servers.log_cause import exit_of
from april.engines.servers.requests import ReadingSettings, RequestOrder
from april.engines.servers.server_api import ServerAPI
from april.engines.supervisor import RestartPolicy, Supervisor
from april.rollout.engine import Chunk, EngineError

log = logging.getLogger(__name__)

STREAMS_HERE = 1024
"""Streams that the driver reads itself: reading those of a few replicas costs less than a process."""
STREAMS_EACH = 4096
"""Streams that a process reads: at 60 tokens/s each, half of what a core takes in."""


def processes_for(streams: int, cores: int) -> int:
    """How many processes should read so many streams; 0: the driver itself."""
    return 0 if streams <= STREAMS_HERE else max(1, min(-(-streams // STREAMS_EACH), cores - 1))


class StreamReader:
    """A process that reads servers' streams, started when it is needed first, and again when it has died.

    Args:
        name: what messages call it.
        restarts: deaths in a row that it is started again after.
    """

    def __init__(self, name: str = "stream reader", restarts: int = RESTARTS) -> None:
        self.name = name
        self.process: LinkedProcess | None = None
        self.down: str | None = f"{name} has not been started"
        """Why it does not run; None while it does."""
        self.life = 0
        """Grows with every start."""
        self._supervisor = Supervisor(RestartPolicy(0.0, restarts, forgiven_after=STEADY))
        self._starting = asyncio.Lock()
        self._servers: dict[int, RemoteRequests] = {}
        self._keys = itertools.count()
        self._calls = Calls(lambda message: self.send(*message), self._hung)

    async def start(self) -> None:
        """See that it runs.

        Raises:
            ReplicaGoneError: it died so often that it is not started again.
            EngineError: it cannot be started.
        """
        async with self._starting:
            if self.down is None:
                return
            if self._supervisor.given_up:
                deaths = self._supervisor.deaths
                raise ReplicaGoneError(f"{self.down}; it died {deaths} times in a row, and is not started again")
            await self._end()
            self._supervisor.starting()
            self.process = await LinkedProcess.start(
                self.name, "april.engines.servers.stream_reader_process", self._received, self._lost
            )
            self._supervisor.running()
            self.down = None
            self.life += 1

    def add(self, reader: RemoteRequests) -> int:
        """The key under which a server's requests are known here."""
        key = next(self._keys)
        self._servers[key] = reader
        return key

    def send(self, *message: Any) -> None:
        """Have something done, if the process lives."""
        if self.down is None and self.process is not None:
            self.process.send(message)

    async def call(self, what: str, key: int, *arguments: Any, limit: float) -> None:
        """Have something done, and wait for it.

        Raises:
            EngineError: the process has died, or has not answered for `limit` seconds and was killed.
        """
        if self.down is not None or self.process is None:
            raise EngineError(self.down)
        self.process.read(True)
        try:
            await self._calls.call(what, key, *arguments, limit=limit)
        finally:
            self.pace()

    @property
    def behind(self) -> bool:
        """Someone whom it reads for does not keep up."""
        return any(server.behind for server in self._servers.values())

    def pace(self) -> None:
        """Read on, unless someone whom it reads for is behind; whoever waits for an answer has it read on anyhow."""
        if self.process is not None:
            self.process.read(len(self._calls) > 0 or not self.behind)

    def _received(self, message: Any) -> None:
        match message:
            case "chunks", several:
                for key, packed in several:
                    if (server := self._servers.get(key)) is not None:
                        server.arrived(packed)
                self.pace()
            case "done", number, error, value:
                self._calls.answered(number, error, value)
            case "log", name, level, text:
                logging.getLogger(name).log(level, "%s", text)

    def _lost(self) -> None:
        self._died("died")

    def _hung(self, reason: str) -> None:
        if self.process is not None:
            self.process.kill()
        self._died(f"{reason}, and was killed")

    def _died(self, reason: str) -> None:
        if self.down is not None:  # it has been closed, or that is known
            return
        self._supervisor.died(reason)
        self.down = f"{self.name} {reason}"
        log.warning("%s; the streams it read go on elsewhere", self.down)
        self._calls.fail(self.down)
        for server in self._servers.values():
            server.wake()

    async def _end(self) -> None:
        self.down = self.down or f"{self.name} has been closed"
        self._calls.fail(self.down)
        process, self.process = self.process, None
        if process is not None:
            log.info("%s ended (%s)", self.name, exit_of(await process.close()))

    async def close(self) -> None:
        async with self._starting:
            await self._end()


class RemoteRequests:
    """The requests of one server, made and read in a stream reader; as `Requests`."""

    def __init__(
        self,
        reader: StreamReader,
        http: HTTPClient,
        api: ServerAPI,
        settings: ReadingSettings,
        why: Callable[[BaseException], str],
    ) -> None:
        self._reader = reader
        self._opening = http, api, settings
        self._why = why
        self._key = reader.add(self)
        self._flight: set[str] = set()
        self._life = 0
        """Of the process, when it learned of this server."""
        self._queue = ChunkQueue(settings.backlog)
        self._patience = settings.patience
        self.vocab_size = 0

    def __len__(self) -> int:
        return len(self._flight)

    async def open(self) -> None:
        """Have the process, which is started if it does not run, take up what is known of the server.

        Raises:
            EngineError: it cannot be started.
        """
        await self._reader.start()
        self._life = self._reader.life
        await self._call("open", *self._opening, self.vocab_size)

    async def _call(self, what: str, *arguments: Any) -> None:
        # A frozen server is resumed, requests are aborted, and their streams end: each has the patience by itself.
        await self._reader.call(what, self._key, *arguments, limit=4 * self._patience)

    def require(self) -> None:
        """Raises EngineError if the process that this server's streams were read in has died."""
        if self._reader.down is not None:
            raise EngineError(self._reader.down)
        if self._life != self._reader.life:
            raise EngineError(f"{self._reader.name} died and knows nothing of this server yet")

    async def check(self) -> None:
        """See that the process lives, and knows this server.

        Raises:
            EngineError: it does not, or hangs.
        """
        self.require()
        if not self._reader.behind:  # else it is this end that does not read
            await self._reader.call("answer", self._key, limit=self._patience)

    def holds(self, version: int, salt: str) -> None:
        self._reader.send("holds", self._key, version, salt)

    def submit(self, order: RequestOrder) -> None:
        self._flight.add(order.sample_id)
        self._reader.send("submit", self._key, order)

    async def poll(self) -> list[Chunk]:
        """What came next. Raises EngineError if the process has died, once all that it had sent is handed out."""
        while not self._queue and self._flight:
            self.require()
            await self._queue.ready()
        return self._take()

    def _take(self, sample_ids: set[str] | None = None) -> list[Chunk]:
        chunks = self._queue.take(sample_ids)
        self._reader.pace()
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopped = set(self._flight) if named is None else self._flight & named
        if stopped:
            self.require()
            await self._call("interrupt", stopped)
        self._flight -= stopped
        self._queue.wake()
        return self._take(named)

    async def abandon(self) -> list[Chunk]:
        with suppress(EngineError):
            await self._call("abandon")
        self._flight.clear()
        return self._take()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._reader.send("forget", self._key, None if sample_ids is None else list(sample_ids))

    async def close(self) -> None:
        with suppress(EngineError):
            await self._call("close")
        self._flight.clear()

    @property
    def behind(self) -> bool:
        return self._queue.full

    def wake(self) -> None:
        self._queue.wake()

    def arrived(self, packed: PackedChunks) -> None:
        for chunk in unpack(packed):
            if chunk.error is not None:
                self._flight.discard(chunk.sample_id)
                self._queue.put(chunk._replace(error=self._why(RequestError(chunk.error))))
                continue
            if chunk.finish is not None:
                self._flight.discard(chunk.sample_id)
            self._queue.put(chunk)
