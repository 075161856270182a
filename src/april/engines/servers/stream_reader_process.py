"""The process of an `StreamReader`: reads servers' streams and sends what came of them, packed.

    python -m april.engines.servers.stream_reader_process FD

with FD its end of a socket pair. It ends when the other end is closed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from typing import Any

from april.engines.calls import Answers
from april.engines.chunk_queue import ChunkQueue
from april.engines.link import Link
from april.engines.packed import pack
from april.engines.servers.client import HTTPClient
from april.engines.servers.requests import ReadingSettings, RequestOrder, Requests
from april.engines.servers.server_api import ServerAPI
from april.rollout.collector import collect_seldom
from april.rollout.engine import Chunk

TOGETHER = 0.005
"""Seconds that a chunk may wait for others to go with."""


class SendQueue(ChunkQueue):
    """The chunks of one server that have not been sent yet."""

    def __init__(self, backlog: int, process: StreamReaderProcess) -> None:
        super().__init__(backlog)
        self._process = process

    def put(self, chunk: Chunk) -> None:
        super().put(chunk)
        self._process.schedule()


class StreamReaderProcess(logging.Handler):
    """What runs here: servers' requests by their keys, and the driver at the other end; what is logged goes there."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ended = asyncio.Event()
        self.link = Link(self._received, self.ended.set, self._flush)
        self._answers = Answers(self.link.send, self._do)
        self._servers: dict[int, tuple[Requests, SendQueue, HTTPClient]] = {}
        self._scheduled = False

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(TOGETHER, self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self.link.full:
            return
        several = [(key, pack(queue.take())) for key, (_, queue, _) in self._servers.items() if queue]
        if several:
            self.link.send(("chunks", several))

    def _received(self, message: Any) -> None:
        match message:
            # Of a server that this process does not know, because the one before it died, the driver hears from itself.
            case "submit", key, RequestOrder() as order if key in self._servers:
                self._servers[key][0].submit(order)
            case "holds", key, version, salt if key in self._servers:
                self._servers[key][0].holds(version, salt)
            case "forget", key, sample_ids if key in self._servers:
                self._servers[key][0].forget(sample_ids)
            case "call", number, what, arguments:
                self._answers.asked(number, what, arguments)

    async def _do(self, what: str, key: int, *arguments: Any) -> None:
        chunks: list[Chunk] = []
        match what:
            case "open":
                await self._close(key)
                await self._open(key, *arguments)
            case "interrupt" if key in self._servers:
                chunks = await self._servers[key][0].interrupt(*arguments)
            case "abandon" if key in self._servers:
                chunks = await self._servers[key][0].abandon()
            case "close":
                await self._close(key)
        if chunks:
            self.link.send(("chunks", [(key, pack(chunks))]))

    async def _open(
        self, key: int, http: HTTPClient, api: ServerAPI, settings: ReadingSettings, vocab_size: int
    ) -> None:
        queue = SendQueue(settings.backlog, self)
        requests = Requests(http, api, settings, queue=queue)
        requests.vocab_size = vocab_size
        self._servers[key] = requests, queue, http

    async def _close(self, key: int) -> None:
        if (server := self._servers.pop(key, None)) is not None:
            requests, _, http = server
            await requests.close()
            await http.close()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.ended.is_set():
            self.link.send(("log", record.name, record.levelno, record.getMessage()))


async def main() -> None:
    process = StreamReaderProcess()
    logger = logging.getLogger("april")
    logger.addHandler(process)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    gc.freeze()
    collect_seldom()
    own_end = socket.socket(fileno=int(sys.argv[1]))
    await asyncio.get_running_loop().create_connection(lambda: process.link, sock=own_end)
    await process.ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
