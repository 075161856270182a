"""Processes that read the streams of servers, so that the driver handles packed chunks and never HTTP.

One driver cannot read the streams of many GPU servers: a core reads what a few of them sample. A `StreamReader` is a
process that holds the connections of several servers, parses and checks their events, and sends packed chunks: each
server's `Requests` are an engine there, and `RemoteRequests` here. Weights, health checks and everything else about a
server stay in the driver.

Invariants, in addition to `RemoteEngine`'s:
- a consumer that falls behind leaves its server's streams unread, and no other server's;
- when a reader dies, or hangs and is killed, the engines whose streams it read fail as engines do. Their `refresh`
  starts it again, after at most `restarts` deaths in a row.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from april.engines.host_process import HostProcess
from april.engines.remote import RemoteEngine
from april.engines.replica import ReplicaGoneError
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.freezable_requests import requests_of
from april.engines.servers.launch import RESTARTS, STEADY
from april.engines.servers.log_cause import exit_of
from april.engines.servers.requests import ReadingSettings, RequestOrder, Requests
from april.engines.servers.server_api import ServerAPI
from april.engines.supervisor import RestartPolicy, Supervisor
from april.rollout.engine import Chunk, EngineError
from april.rollout.gc_tuning import raise_gc_thresholds
from april.rollout.patience import patient_timeout

log = logging.getLogger(__name__)

STREAMS_HERE = 1024
"""Streams that the driver reads itself: the streams of a few replicas cost less than a process."""
STREAMS_EACH = 4096
"""Streams that a process reads: at 60 tokens/s each, half of what a core reads."""
ABANDON_SECONDS = 5.0
"""Time for a reader to give up a session."""


def processes_for(streams: int, cores: int) -> int:
    """Return the number of processes to read `streams` streams; 0: the driver reads them."""
    # `cores - 1`, because the driver needs a core itself.
    return 0 if streams <= STREAMS_HERE else max(1, min(-(-streams // STREAMS_EACH), cores - 1))


class StreamReader:
    """A process that reads servers' streams, started when it is first needed, and again when it has died.

    Args:
        name: name in messages.
        restarts: maximum number of consecutive restarts.

    Attributes:
        life: number of starts.
    """

    def __init__(self, name: str = "stream reader", restarts: int = RESTARTS) -> None:
        self.name = name
        self.process: HostProcess | None = None
        self.life = 0
        self._supervisor = Supervisor(RestartPolicy(0.0, restarts, forgiven_after=STEADY))
        self._starting = asyncio.Lock()

    @property
    def down(self) -> str | None:
        """Why it does not run; None while it does."""
        return f"{self.name} has not been started" if self.process is None else self.process.down

    async def start(self) -> HostProcess:
        """Return the process, started if it does not run.

        Raises:
            ReplicaGoneError: it died so often that it is not started again.
            EngineError: it cannot be started.
        """
        async with self._starting:
            if self.process is not None and self.process.down is None:
                return self.process
            if self._supervisor.given_up:
                deaths = self._supervisor.deaths
                raise ReplicaGoneError(f"{self.down}; it died {deaths} times in a row, and is not started again")
            await self._end()
            self._supervisor.starting()
            self.process = await HostProcess.start(self.name, on_death=self._died)
            self._supervisor.running()
            self.life += 1
            return self.process

    def _died(self, reason: str) -> None:
        self._supervisor.died(reason)
        log.warning("%s; its servers' samples are moved to other replicas", reason)

    def kill(self, reason: str) -> None:
        if self.process is not None:
            self.process.kill(f"{self.name} {reason}, and was killed")

    async def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            log.info("%s ended (%s)", self.name, exit_of(await process.close()))

    async def close(self) -> None:
        async with self._starting:
            await self._end()


@dataclass(frozen=True, slots=True)
class RequestsLoader:
    """An `EngineLoader` of a server's requests."""

    http: HTTPClient
    api: ServerAPI
    settings: ReadingSettings
    vocab_size: int

    def load(self) -> Requests:
        # Modules live as long as the process: exclude them from collections, which many small objects trigger here.
        gc.freeze()
        raise_gc_thresholds()
        requests = requests_of(self.http, self.api, self.settings, owns_client=True)
        requests.vocab_size = self.vocab_size
        return requests


class RemoteRequests(RemoteEngine):
    """The requests of one server, made and read by a stream reader; as `Requests`."""

    batch_seconds = 0.005

    def __init__(
        self,
        reader: StreamReader,
        http: HTTPClient,
        api: ServerAPI,
        settings: ReadingSettings,
        why: Callable[[BaseException], str],
    ) -> None:
        super().__init__()
        self.vocab_size = 0
        self.patience = settings.patience
        # A frozen server is resumed, requests are aborted, and their streams end: each may take `patience`.
        self.call_timeout = 4 * settings.patience
        self.window = settings.backlog
        self._reader_process = reader
        self._opening = http, api, settings
        self._why = why

    def __len__(self) -> int:
        return len(self._in_flight)

    async def open(self) -> None:
        """Have the reader, which is started if it does not run, serve the server's requests.

        Raises:
            EngineError: the reader cannot be started.
        """
        await self.close()
        process = await self._reader_process.start()
        await self._load(process.channel(), RequestsLoader(*self._opening, self.vocab_size), self.call_timeout)

    def _hung(self, reason: str) -> None:
        self._reader_process.kill(reason)

    async def check(self) -> None:
        """See that the reader lives and answers.

        Raises:
            EngineError: it does not, or hangs.
        """
        await self.ping()

    def set_weights(self, version: int, salt: str) -> None:
        self._notify("set_weights", version, salt)

    def submit(self, order: RequestOrder) -> None:  # type: ignore[override]
        self._submit(order.sample_id, order)

    def _take(self, names: set[str] | None = None) -> list[Chunk]:
        # Only this process watches the server's process, and can give its death as the reason.
        chunks = super()._take(names)
        return [c if c.error is None else c._replace(error=self._why(RequestError(c.error))) for c in chunks]

    async def abandon(self) -> list[Chunk]:
        # Shorter than a health check: the chunks that have arrived must not be lost with it.
        with suppress(EngineError, TimeoutError):
            async with patient_timeout(ABANDON_SECONDS):
                await self._call("abandon")
        chunks = self._take()
        self._in_flight.clear()
        return chunks

    async def close(self) -> None:
        with suppress(EngineError):
            await self._call("close")
        self._disconnect("it has been closed")
        self._in_flight.clear()
