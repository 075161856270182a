"""A process that reads the streams of several servers, so that the driver sees packed chunks and never HTTP.

One driver cannot read the streams of many GPU servers: a core takes in what a few of them sample. So processes of their
own (`intake_process.py`) hold the connections, parse the events and check them, and send chunks over a socket, packed.
Weights, health and everything else about a server stay in the driver.

Invariants:
- what a process has sent is handed out in the order in which it was sent, and what it sent for a sample before it
  answers that the sample is interrupted is handed out by that interrupt;
- a driver that falls behind leaves the socket unread, and the processes their streams; while it interrupts, it reads;
- a process that dies takes with it nothing but what it had not sent: the engines whose streams it read fail as engines
  do, and start it again when they are asked to come back, at most `restarts` times in a row;
- no process outlives `close`, nor this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.replica import ReplicaGoneError
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.dialect import Dialect
from april.engines.servers.launch import RESTARTS, STEADY
from april.engines.servers.link import Link
from april.engines.servers.log_cause import exit_of
from april.engines.servers.packed import PackedChunks, unpack
from april.engines.servers.requests import Order, ReadingSettings
from april.rollout.engine import Chunk, EngineError

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a process has to end itself before it is killed."""
STREAMS_HERE = 1024
"""Streams that the driver reads itself: reading those of a few replicas costs less than a process."""
STREAMS_EACH = 4096
"""Streams that a process reads: at 60 tokens/s each, half of what a core takes in."""


def processes_for(streams: int, cores: int) -> int:
    """How many processes should read so many streams; 0: the driver itself."""
    return 0 if streams <= STREAMS_HERE else max(1, min(-(-streams // STREAMS_EACH), cores - 1))


class Intake:
    """A process that reads servers' streams, started when it is needed first, and again when it has died.

    Args:
        name: what messages call it.
        restarts: deaths in a row that it is started again after.
    """

    def __init__(self, name: str = "intake process", restarts: int = RESTARTS) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.down: str | None = f"{name} has not been started"
        """Why it does not run; None while it does."""
        self.life = 0
        """Grows with every start."""
        self._restarts = restarts
        self._deaths = 0
        self._began = 0.0
        self._starting = asyncio.Lock()
        self._link: Link | None = None
        self._readers: dict[int, RemoteRequests] = {}
        self._keys = itertools.count()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[None]] = {}

    async def start(self) -> None:
        """See that it runs.

        Raises:
            ReplicaGoneError: it died so often that it is not started again.
            EngineError: it cannot be started.
        """
        async with self._starting:
            if self.down is None:
                return
            if self._deaths > self._restarts:
                raise ReplicaGoneError(f"{self.down}; it died {self._deaths} times in a row, and is not started again")
            await self._reap()
            ours, theirs = socket.socketpair()
            path = os.pathsep.join(filter(None, sys.path))
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "april.engines.servers.intake_process", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is for the driver, which ends it
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"{self.name} could not be started: {error}") from error
            finally:
                theirs.close()
            loop = asyncio.get_running_loop()
            _, self._link = await loop.create_connection(lambda: Link(self._received, self._lost), sock=ours)
            self.down, self._began = None, loop.time()
            self.life += 1

    def add(self, reader: RemoteRequests) -> int:
        """The key under which a server's requests are known here."""
        key = next(self._keys)
        self._readers[key] = reader
        return key

    def send(self, *message: Any) -> None:
        """Have something done, if the process lives."""
        if self.down is None and self._link is not None:
            self._link.send(message)

    async def call(self, what: str, key: int, *arguments: Any) -> None:
        """Have something done, and wait for it.

        Raises:
            EngineError: the process has died.
        """
        if self.down is not None or self._link is None:
            raise EngineError(self.down or "")
        number = next(self._numbers)
        done = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(("call", number, key, what, arguments))
            self.pace()
            await done
        finally:
            del self._calls[number]
            self.pace()

    def pace(self) -> None:
        """Read on, unless someone whom it reads for is behind; whoever waits for an answer has it read on anyhow."""
        if self._link is not None:
            self._link.read(bool(self._calls) or not any(reader.behind for reader in self._readers.values()))

    def _received(self, message: Any) -> None:
        match message:
            case "chunks", several:
                for key, packed in several:
                    if (reader := self._readers.get(key)) is not None:
                        reader.arrived(packed)
                self.pace()
            case "done", number, error:
                if (done := self._calls.get(number)) is not None and not done.done():
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(EngineError(error))
            case "log", name, level, text:
                logging.getLogger(name).log(level, "%s", text)

    def _lost(self) -> None:
        """The process has closed its end: it has died, or been closed."""
        self._link = None
        if self.down is None:
            steady = asyncio.get_running_loop().time() - self._began > STEADY
            self._deaths = 1 if steady else self._deaths + 1
            self.down = f"{self.name} died"
            log.warning("%s; the streams it read go on elsewhere", self.down)
        for done in self._calls.values():
            if not done.done():
                done.set_exception(EngineError(self.down))
        for reader in self._readers.values():
            reader.wake()

    async def _reap(self) -> None:
        if self.process is not None:
            try:
                async with asyncio.timeout(GRACE):
                    await self.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
            assert self.process.returncode is not None
            log.info("%s ended (%s)", self.name, exit_of(self.process.returncode))
            self.process = None

    async def close(self) -> None:
        async with self._starting:
            self.down = self.down or f"{self.name} has been closed"
            if self._link is not None:
                self._link.close()
            await self._reap()


class RemoteRequests:
    """The requests of one server, made and read in an intake process; as `Requests`."""

    def __init__(
        self,
        intake: Intake,
        http: HTTPClient,
        dialect: Dialect,
        settings: ReadingSettings,
        why: Callable[[BaseException], str],
    ) -> None:
        self._intake = intake
        self._opening = http, dialect, settings
        self._why = why
        self._key = intake.add(self)
        self._flight: set[str] = set()
        self._life = 0
        """Of the process, when it learned of this server."""
        self._queue = ChunkQueue(settings.backlog)
        self.vocab_size = 0

    def __len__(self) -> int:
        return len(self._flight)

    async def open(self) -> None:
        """Have the process, which is started if it does not run, take up what is known of the server.

        Raises:
            EngineError: it cannot be started.
        """
        await self._intake.start()
        self._life = self._intake.life
        await self._intake.call("open", self._key, *self._opening, self.vocab_size)

    def require(self) -> None:
        """Raises EngineError if the process that this server's streams were read in has died."""
        if self._intake.down is not None:
            raise EngineError(self._intake.down)
        if self._life != self._intake.life:
            raise EngineError(f"{self._intake.name} died and knows nothing of this server yet")

    def holds(self, version: int, salt: str) -> None:
        self._intake.send("holds", self._key, version, salt)

    def submit(self, order: Order) -> None:
        self._flight.add(order.sample_id)
        self._intake.send("submit", self._key, order)

    async def poll(self) -> list[Chunk]:
        """What came next. Raises EngineError if the process has died, once all that it had sent is handed out."""
        while not self._queue and self._flight:
            self.require()
            await self._queue.ready()
        return self._take()

    def _take(self, sample_ids: set[str] | None = None) -> list[Chunk]:
        chunks = self._queue.take(sample_ids)
        self._intake.pace()
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopped = set(self._flight) if named is None else self._flight & named
        if stopped:
            self.require()
            await self._intake.call("interrupt", self._key, stopped)
        self._flight -= stopped
        self._queue.wake()
        return self._take(named)

    async def abandon(self) -> list[Chunk]:
        with suppress(EngineError):
            await self._intake.call("abandon", self._key)
        self._flight.clear()
        return self._take()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._intake.send("forget", self._key, None if sample_ids is None else list(sample_ids))

    async def close(self) -> None:
        with suppress(EngineError):
            await self._intake.call("close", self._key)
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
