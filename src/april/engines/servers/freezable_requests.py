"""Requests of a server that is frozen while its weights change (`on_update = "keep"`).

An interrupt of all samples freezes the server: its requests pause with their KV caches. Samples that are submitted
again are resumed on the same streams; the requests of all other samples are aborted before the server resumes.

Further invariants (see `requests.py`):
- tokens that arrive while the server is frozen were sampled with the weights that it was frozen with;
- tokens that arrive while their sample is not in flight are held, and are the first that the sample gets when it is
  submitted again with the tokens before them; tokens of a forgotten sample are never handed out;
- tasks that outlive `interrupt` are the streams that the server has frozen; none outlives `close`.

Server:  RUNNING ──interrupt of all samples──> FROZEN ──submit──> THAWING ──> RUNNING

Stream:  RUNNING ──freeze──> FROZEN ──submitted again──> RUNNING
                                │  └──forgotten, or nothing received──> DISCARDED ──thaw──> aborted
                                └──thaw without its sample──> ENDING ──aborted, read to its end──> its tokens are held
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum

from april.engines.servers.client import FAILURES, HTTPClient, describe
from april.engines.servers.requests import ReadingSettings, RequestOrder, Requests
from april.engines.servers.server_api import Pausing, ServerAPI
from april.engines.servers.stream import Stream, StreamState
from april.rollout.engine import Chunk
from april.rollout.patience import patient_timeout

log = logging.getLogger(__name__)

SILENCE = 0.02
"""Seconds without data after which everything that a frozen server had sent has arrived."""


class ServerState(Enum):
    RUNNING = "running"
    FROZEN = "frozen"
    """Nothing is sampled, and the weights may change."""
    THAWING = "thawing"
    """It is being resumed, and all tokens from before have arrived."""


class FreezableRequests(Requests):
    """Requests of a server that can be frozen.

    Args:
        http, api, settings, why, owns_client: as of `Requests`. The stream interval is 1: tokens that a frozen server
            has sampled but not sent would be taken for tokens of the new weights.
    """

    def __init__(
        self,
        http: HTTPClient,
        api: ServerAPI,
        settings: ReadingSettings,
        why: Callable[[BaseException], str] = describe,
        owns_client: bool = False,
    ) -> None:
        assert api.pausing is not None, "ServerEngine refuses on_update = keep without it"
        super().__init__(http, api, settings._replace(stream_interval=1), why, owns_client)
        self._pausing: Pausing = api.pausing
        self._server = ServerState.RUNNING
        self._parked: dict[str, Stream] = {}
        """Streams of samples that are not in flight: FROZEN, ENDING or DISCARDED; ended ones only with held tokens."""
        self._thawing: asyncio.Task[None] | None = None

    def submit(self, order: RequestOrder) -> None:
        self._expect_data()
        if self._server is ServerState.FROZEN and self._thawing is None:
            self._thawing = asyncio.create_task(self._resume(), name=f"resume {self._name}")
        parked = self._parked.get(order.sample_id)
        if parked is not None and not parked.continues(order.token_ids):
            self.forget([order.sample_id])
        if parked is not None and parked.state is StreamState.FROZEN and parked.open:
            del self._parked[order.sample_id]
            parked.state = StreamState.RUNNING
            self._streams[order.sample_id] = parked
            self._hand_out_held(parked)
        else:
            # An earlier stream that cannot be resumed has to end first: its held tokens precede the new ones.
            self._start(order, after=parked)

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """As `Requests.interrupt`. If all samples are stopped, the server is frozen and their requests can be resumed.

        A server can only be frozen as a whole: samples that are stopped while other samples continue are aborted.
        """
        if self._thawing is not None:
            await self._thawing
        return await super().interrupt(sample_ids)

    async def _stop(self, streams: dict[str, Stream]) -> None:
        if not self._streams:  # those that were stopped had not been sent
            return
        if all(id in streams for id in self._streams):
            await self._freeze()
        else:
            await self._abort(streams.values())

    async def _freeze(self) -> None:
        try:
            async with patient_timeout(self._patience):
                await self._pausing.freeze()
                # Set before the wait: late tokens must be recorded under the version that sampled them (`_labelled`).
                self._server = ServerState.FROZEN
                await self._watch.silence(SILENCE)
        except FAILURES as error:
            log.warning("%s could not be paused, its requests are cut: %s", self._name, describe(error))
            await self._cancel(self._streams.values())
        for id, stream in self._streams.items():
            if stream.open:
                # A request without a token is not worth keeping: its first token would be of the old weights, and make
                # its group older than the staleness bound has been reckoned with.
                stream.state = StreamState.FROZEN if stream.received else StreamState.DISCARDED
                self._parked[id] = stream

    async def _resume(self) -> None:
        # Let all samples that are submitted together take their streams back first.
        await asyncio.sleep(0)
        problem = ""
        try:
            await self._thaw()
        except FAILURES as error:
            problem = f"{self._name} could not be resumed: {describe(error)}"
        finally:
            self._thawing = None
        if problem:  # a sample that is submitted again from here on resumes the server again
            await self._fail(problem)

    async def _thaw(self) -> None:
        """Abort the requests whose samples are not in flight, and resume the server with all other requests."""
        ending = [stream for stream in self._parked.values() if stream.open]
        for stream in ending:
            if stream.state is StreamState.FROZEN:
                stream.state = StreamState.ENDING
        async with patient_timeout(self._patience):
            if ending:
                await self._request_abort(ending)
            # Tokens of the old weights must arrive first, because the server's labels count again in THAWING.
            await self._watch.silence(SILENCE)
            self._server = ServerState.THAWING
            for stream in self._streams.values():
                stream.version = self._version
            try:
                await self._pausing.thaw()
            except BaseException:
                # Also if cancelled: the server may still be paused, and the next submission tries again.
                self._server = ServerState.FROZEN
                raise
            self._server = ServerState.RUNNING
        # A paused server may end aborted requests only after it is resumed: read their streams to the end now.
        await self._abort(ending)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Do not resume these samples: a sample that is submitted under one of their ids starts from its own tokens."""
        for id in list(self._parked) if sample_ids is None else self._parked.keys() & set(sample_ids):
            stream = self._parked[id]
            stream.state = StreamState.DISCARDED
            stream.held.clear()
            if not stream.open:
                del self._parked[id]

    async def close(self) -> None:
        with suppress(*FAILURES):
            if self._thawing is not None:
                await self._thawing
            # The server outlives this connection: a paused one would answer no later request.
            if self._server is not ServerState.RUNNING:
                await self._thaw()
        await super().close()

    async def abandon(self) -> list[Chunk]:
        if self._thawing is not None:
            self._thawing.cancel()
            await asyncio.gather(self._thawing, return_exceptions=True)
        chunks = await super().abandon()
        self._server, self._thawing = ServerState.RUNNING, None
        return chunks

    def _open(self) -> list[Stream]:
        return [*super()._open(), *(stream for stream in self._parked.values() if stream.open)]

    async def _may_send(self, stream: Stream) -> bool:
        """Wait for the earlier stream of a sample, and continue after its held tokens unless they end the sample."""
        earlier, stream.after = stream.after, None
        if earlier is None:
            return True
        if earlier.task is not None:
            await asyncio.wait([earlier.task])
        held = self._hand_out_held(earlier)
        if self._parked.get(stream.sample_id) is earlier:
            del self._parked[stream.sample_id]
        for chunk in held:
            stream.token_ids.extend(chunk.token_ids)
            stream.budget -= len(chunk.token_ids)
        return not any(chunk.finish is not None for chunk in held)

    def _hand_out_held(self, stream: Stream) -> list[Chunk]:
        held, stream.held = stream.held, []
        for chunk in held:
            self._queue.put(chunk)
        return held

    def _ended(self, stream: Stream) -> None:
        super()._ended(stream)
        if self._parked.get(stream.sample_id) is stream and not stream.held:
            del self._parked[stream.sample_id]

    @property
    def _labelled(self) -> bool:
        """False while the server is frozen: it labels late tokens with the weights that it holds when it sends them."""
        return self._server is not ServerState.FROZEN

    def _deliver(self, stream: Stream, chunk: Chunk) -> None:
        if stream.state in (StreamState.FROZEN, StreamState.ENDING):
            stream.held.append(chunk)
        elif stream.state is not StreamState.DISCARDED:
            super()._deliver(stream, chunk)


def requests_of(
    http: HTTPClient,
    api: ServerAPI,
    settings: ReadingSettings,
    why: Callable[[BaseException], str] = describe,
    owns_client: bool = False,
) -> Requests:
    """Return requests of the kind that the server's KV policy needs."""
    kind = FreezableRequests if settings.on_update == "keep" else Requests
    return kind(http, api, settings, why, owns_client)
