"""The program of a `HostProcess`: serves an engine on each channel that the other process opens.

    python -m april.engines.host_process_main FD

with FD its end of a socket pair. It ends when the other end is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import suppress
from typing import Any, Protocol

from april.engines.channel import Channel
from april.engines.connection import Connection
from april.engines.engine_server import EngineServer
from april.engines.multiplexer import Multiplexer, SharedChannel
from april.engines.rpc import reason_of


class EngineLoader(Protocol):
    """What the other process sends to have an engine served."""

    def load(self) -> Any:
        """Return the engine. Runs in this process."""
        ...


class LogHandler(logging.Handler):
    """Sends log records to the other process."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record. Any thread may log."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._channel.send, (record.name, record.levelno, record.getMessage()))


async def serve(channel: SharedChannel) -> None:
    """Load the engine that the first message names, and serve it until its channel closes."""
    loader: EngineLoader
    _, number, _, (loader, window, batch_seconds) = await channel.receive()
    try:
        engine = loader.load()
    except Exception as error:  # the other end waits for an answer
        channel.send(("answer", number, reason_of(error), None))
        channel.close()
        return
    channel.send(("answer", number, None, getattr(engine, "capacity", None)))
    await EngineServer(engine, channel, window, batch_seconds).run()
    await engine.close()


def log_to(channel: Channel) -> None:
    logger = logging.getLogger("april")
    logger.addHandler(LogHandler(channel))
    logger.setLevel(logging.INFO)
    # The other process logs these records; handlers of this process would print them a second time.
    logger.propagate = False


async def main(own_end: socket.socket) -> None:
    servers: set[asyncio.Task[None]] = set()

    def accept(channel: SharedChannel) -> None:
        if not accepted:  # the first one is for the log
            log_to(channel)
        else:
            task = asyncio.create_task(serve(channel))
            servers.add(task)
            task.add_done_callback(servers.discard)
        accepted.append(channel)

    accepted: list[Channel] = []
    ended = asyncio.Event()
    Multiplexer(await Connection.open(own_end), lambda reason: ended.set(), accept)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(socket.socket(fileno=int(sys.argv[1]))))
