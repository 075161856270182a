"""HTTP client of a server: one connection pool, server-sent events.

Invariant: every call has a time limit, and a warning names a call that a server leaves unanswered for long.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec

from april.images.source import ImageError
from april.rollout.engine import Fault
from april.rollout.patience import patient_timeout

log = logging.getLogger(__name__)

WARNED_AFTER = 5.0
"""Seconds without an answer after which a warning names the call."""
_limit: ContextVar[float | None] = ContextVar("limit", default=None)


@contextmanager
def call_limit(seconds: float) -> Iterator[None]:
    """Set the time limit of each call in this context."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


class RequestError(Exception):
    """One request failed; the server may be well.

    Args:
        status: of the HTTP response, if there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @classmethod
    def of(cls, path: str, status: int, text: str) -> RequestError:
        """The error of a response whose status is not 200, with the remedy if the settings are the cause."""
        remedy = REMEDIES.get(status)
        return cls(f"{path}: HTTP {status}: {text[:500]}{f' ({remedy})' if remedy else ''}", status)


WRONG_KEY = "the server asks for another key: set APRIL_ENGINE_API_KEY, or api_key"
REMEDIES = {
    401: WRONG_KEY,
    403: WRONG_KEY,
    404: "no such path there: docs/engines.md has the versions and options of servers",
}
NOT_REACHED = {408, 429, 502, 503, 504}
"""Statuses of a gateway, or of a server that has no room: the model has not seen the request."""


def fault_of(error: BaseException) -> Fault:
    """Return the kind of fault of a failed request."""
    if isinstance(error, ImageError):
        return Fault.INPUT
    status = error.status if isinstance(error, RequestError) else None
    if status in NOT_REACHED or isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Fault.UNAVAILABLE
    return Fault.REFUSED if status is not None and 400 <= status < 500 else Fault.UNKNOWN


JSON = {"Content-Type": "application/json"}

FAILURES = (RequestError, aiohttp.ClientError, TimeoutError)
"""Exceptions of calls whose server or connection fails."""


class HTTPClient:
    """HTTP client of one server.

    Args:
        url: address of the server, `http://host:port`.
        patience: seconds that making a connection may take, and a call, unless a `call_limit` is set.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, patience: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the session: another process opens its own connections."""
        return {**self.__dict__, "_session": None}

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Return aiohttp's response context, for `async with`.

        Args:
            body: encoded as JSON, unless it is bytes.
        """
        if self._session is None:
            # Servers close idle connections after 5 s; ours go first, or a request meets a closing one. No limit on
            # connections: the server queues, and a control call must never wait behind a stream.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience)
            self._session = aiohttp.ClientSession(
                self.url, connector=connector, timeout=timeout, headers=self._headers, read_bufsize=2**16
            )
        if body is None:
            return self._session.request(method, path)
        encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self._session.request(method, path, data=encoded, headers=JSON)

    async def post(self, path: str, body: Any = None) -> Any:
        """Return the response, decoded if it is JSON.

        Raises:
            RequestError: the status is not 200, or the server does not answer in time.
        """
        status, text = await self.status("POST", path, body)
        return _decoded(path, status, text)

    async def get(self, path: str) -> Any:
        """As `post`."""
        status, text = await self.status("GET", path)
        return _decoded(path, status, text)

    async def status(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return status and text of the answer.

        Raises:
            RequestError: the server does not answer in time.
        """
        limit = _limit.get() or self._patience
        loop, url = asyncio.get_running_loop(), f"{self.url}{path.partition('?')[0]}"
        warned = min(WARNED_AFTER, limit / 2)
        message = "waiting for %s: no answer for %g s, waiting for at most %g s"
        warning = loop.call_later(warned, log.warning, message, url, warned, limit)
        try:
            async with patient_timeout(limit) as timeout, self.request(method, path, body) as response:
                return response.status, await response.text()
        except TimeoutError as error:
            # aiohttp's own timeouts are TimeoutErrors too, and their messages are more precise.
            if not timeout.expired():
                raise
            raise RequestError(f"{path}: no answer in {limit:g} s") from error
        finally:
            warning.cancel()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _decoded(path: str, status: int, text: str) -> Any:
    if status != 200:
        raise RequestError.of(path, status, text)
    if not text:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events, as JSON."""
    for line in lines:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield data


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, RequestError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
