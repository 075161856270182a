"""Talking to a server over HTTP: one client, one connection pool, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp
import msgspec


class RequestError(Exception):
    """One request failed; the server may be well."""


JSON = {"Content-Type": "application/json"}

FAILURES = (RequestError, aiohttp.ClientError, TimeoutError)
"""What a call to a server may raise when server or connection fails."""


class HTTPClient:
    """A server's calls, by their paths.

    Args:
        url: where the server listens, `http://host:port`.
        connect_timeout: seconds a connection may take to be made. Nothing else is timed here.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, connect_timeout: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._connect_timeout = connect_timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        """In another process it has connections of its own."""
        return {**self.__dict__, "_session": None}

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The response as aiohttp gives it, to be entered with `async with`."""
        if self._session is None:
            # Servers close idle connections after 5 s; ours go first, or a request meets a closing one. No limit on
            # connections: the server queues, and a control call must never wait behind a stream.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout)
            self._session = aiohttp.ClientSession(
                self.url, connector=connector, timeout=timeout, headers=self._headers, read_bufsize=2**16
            )
        if body is None:
            return self._session.request(method, path)
        return self._session.request(method, path, data=msgspec.json.encode(body), headers=JSON)

    async def post(self, path: str, body: Any = None) -> Any:
        """The answer, decoded if it is JSON. Raises RequestError unless the status is 200."""
        async with self.request("POST", path, body) as response:
            return await self._answer(path, response)

    async def get(self, path: str) -> Any:
        """As `post`."""
        async with self.request("GET", path) as response:
            return await self._answer(path, response)

    async def _answer(self, path: str, response: aiohttp.ClientResponse) -> Any:
        text = await response.text()
        if response.status != 200:
            raise RequestError(f"{path}: HTTP {response.status}: {text[:500]}")
        if not text:
            return None
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """What server-sent events hold, as JSON."""
    for line in lines:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield data


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, RequestError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
