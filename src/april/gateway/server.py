"""One HTTP server for the programs of all episodes.

Invariants:
- a request reaches an episode by that episode's secret only: as a Bearer token, as `x-api-key`, or in the path. The
  secret is the episode's key with a signature, so that a resumed run knows it;
- a request waits as long as the policy takes, over training too; bytes that are sent all the time keep its client
  waiting;
- a client that leaves affects its own request only: the core keeps the turns that were not delivered;
- an error has the shape of its API, and neither 429 nor 5xx is the answer to a fault that a retry would meet again.

    <address>/v1/chat/completions                 with the secret as API key
    <address>/episodes/<secret>/v1/messages       with the secret in the path
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import resource
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote
from urllib.request import getproxies_environment

import msgspec
from aiohttp import web

from april.gateway.access import Access, without_proxy
from april.gateway.anthropic_messages import AnthropicMessages
from april.gateway.chat_completions import ChatCompletions
from april.gateway.fields import Ignored
from april.gateway.request import API, Request, Tokens
from april.gateway.request_errors import RequestError
from april.gateway.request_images import RequestImages
from april.gateway.request_sampling import with_temperature
from april.gateway.responses import Responses
from april.images.kept import KeptImages
from april.rollout.episodes.turns import (
    BadTurn,
    EpisodeOver,
    Policy,
    PromptTooLong,
    Renderer,
    Stopping,
    TurnReply,
    TurnRequest,
)

log = logging.getLogger(__name__)

DISCARDED = 2**30
"""Bytes of a body that is too large which are read, so that its client sees the answer."""
PATIENCE = 60.0
"""Seconds before a response that is no stream is begun, to keep its client waiting. Later errors have no status."""
STOPPED = "run_stopped"
"""Code of the only error that clients should retry: the run may have been resumed."""
ANY = "*"
"""Stands for all names of models."""


@dataclass(frozen=True, slots=True)
class GatewayParams:
    """Settings of a gateway.

    Args:
        host: interface that is listened on. Any other than the loopback interface lets other machines in.
        port: 0: any free port.
        address: base of the URLs that programs get, if they reach the gateway by another name than `host`.
        models: names of models that requests may have; "*" stands for all.
        own_temperature: the temperature of a request is that of its turn; False: it has no effect.
        keep_alive: seconds between the bytes that are sent while a client waits.
        max_body: bytes that a request may have.
    """

    host: str = "127.0.0.1"
    port: int = 0
    address: str | None = None
    models: Sequence[str] = ("policy",)
    own_temperature: bool = False
    keep_alive: float = 5.0
    max_body: int = 32 * 2**20

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: name at least one model")
        if self.keep_alive <= 0:
            raise ValueError(f"keep_alive = {self.keep_alive!r}: must be positive seconds")


class Gateway:
    """Server of the episodes of a run.

    Args:
        policy: draws the turns; may be set later, before the first request.
        renderer: counts tokens for Anthropic's API; None: that is refused.
        tokens: text of single tokens, for log-probabilities; None: they are refused.
        settings: see `GatewayParams`.
        run_secret: key of the signatures in the episodes' secrets. A resumed run with the same key accepts programs
            that outlived it. None: a new one.
        images: keeps the images of requests; None: requests have text alone.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        renderer: Renderer | None = None,
        tokens: Tokens | None = None,
        settings: GatewayParams | None = None,
        run_secret: bytes | None = None,
        images: KeptImages | None = None,
    ) -> None:
        self.policy = policy
        self._images = RequestImages(images)
        self.settings = settings or GatewayParams()
        self._renderer = renderer
        self._run_secret = run_secret or secrets.token_bytes(32)
        self._ignored = Ignored()
        self._chat = ChatCompletions(tokens)
        self._responses = Responses(tokens)
        self._messages = AnthropicMessages()
        self._runner: web.AppRunner | None = None
        self._address = ""

    def access(self, episode_key: str) -> Access:
        """Return what the program of an episode needs."""
        assert self._address, "the gateway has not been started"
        secret = f"{episode_key}.{self._signature(episode_key)}"
        return Access(self._address, secret, f"{self._address}/episodes/{quote(secret, safe='')}", self._names[0])

    @property
    def _names(self) -> Sequence[str]:
        """Names of models that requests may have, at least one."""
        return [name for name in self.settings.models if name != ANY] or ["policy"]

    def _signature(self, episode_key: str) -> str:
        key = episode_key.encode(errors="surrogatepass")
        return hmac.new(self._run_secret, key, hashlib.sha256).hexdigest()[:40]

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        for prefix in ("/episodes/{secret}", ""):
            app.router.add_route("*", prefix + "/{tail:.*}", self._handle)
        # A client that disconnects cancels its handler, so that the core keeps the turn as undelivered.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=3600)
        await self._runner.setup()
        host, port = self.settings.host, self.settings.port
        site = web.TCPSite(self._runner, host, port, backlog=4096, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise OSError(f"gateway: {host}:{port} cannot be listened on: {error.strerror or error}") from None
        _raise_open_files()
        bound = self._runner.addresses[0][1]
        named = f"[{host}]" if ":" in host else host
        self._address = (self.settings.address or f"http://{named}:{bound}").rstrip("/")
        if getproxies_environment():  # functions use clients in this process
            os.environ.update(without_proxy(self._address, os.environ))

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        path = "/" + http.match_info["tail"].strip("/")
        path = path.removeprefix("/v1")
        api = self._api(path)
        try:
            episode = self._episode(http)
            body = await self._body(http)
            if http.method == "GET" and (path == "/models" or path.startswith("/models/")):
                return self._models(path, "anthropic-version" in http.headers)
            if http.method == "GET" and path == "":
                return web.json_response({"status": "ok"})
            if http.method != "POST" or path not in ROUTES:
                raise RequestError(
                    f"Unknown request: {http.method} {http.path}. The gateway has POST {', '.join(ROUTES)} and GET "
                    "/models, each behind /v1.",
                    HTTPStatus.NOT_FOUND,
                )
            async with self._images.named(self._read(api, body, http.headers)) as request:
                if path == "/messages/count_tokens":
                    return self._count(request)
                return await self._answer(http, api, episode, request)
        except RequestError as error:
            return _refusal(api, error)

    def _api(self, path: str) -> API:
        if path.startswith("/messages"):
            return self._messages
        return self._responses if path.startswith("/responses") else self._chat

    def _episode(self, http: web.Request) -> str:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for given in (http.match_info.get("secret"), bearer, http.headers.get("x-api-key")):
            episode, _, signature = (given or "").rpartition(".")
            if hmac.compare_digest(signature.encode(errors="surrogatepass"), self._signature(episode).encode()):
                return episode
        raise RequestError(
            "Incorrect API key provided: it is the key of no episode of this run. april gives each program its own.",
            HTTPStatus.UNAUTHORIZED,
            "invalid_api_key",
        )

    async def _body(self, http: web.Request) -> bytes:
        parts, size, most = [], 0, self.settings.max_body
        async for part in http.content.iter_any():
            size += len(part)
            if size <= most:
                parts.append(part)
            elif size > most + DISCARDED:
                break
        if size > most:
            raise RequestError(
                f"The request has {size} bytes or more, the gateway takes {most}.",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "request_too_large",
            )
        return b"".join(parts)

    def _read(self, api: API, body: bytes, headers: Mapping[str, str]) -> Request:
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"We could not parse the JSON body of your request: {error}") from None
        if not isinstance(fields, dict):
            raise RequestError("We could not parse the JSON body of your request: it is no object")
        try:
            request = api.read(fields)
        except RequestError:
            raise
        except Exception as error:  # a fault of april's: a retry would meet it again
            log.warning("a request cannot be read: %s", error, exc_info=True)
            raise RequestError(f"The request cannot be read: {type(error).__name__}: {error}") from None
        models = self.settings.models
        if request.model not in models and ANY not in models:
            raise RequestError(
                f"The model '{request.model[:60]}' does not exist. The gateway's models are {', '.join(models)}.",
                HTTPStatus.NOT_FOUND,
                "model_not_found",
                "model",
            )
        if self.settings.own_temperature:
            request = with_temperature(request)
        self._ignored.log(request.ignored, request.left_out)
        key = headers.get("Idempotency-Key")
        retry = headers.get("x-stainless-retry-count", "0") not in ("0", "")
        return replace(request, turn=replace(request.turn, key=key, retry=retry))

    async def _answer(self, http: web.Request, api: API, episode: str, request: Request) -> web.StreamResponse:
        drawing = asyncio.ensure_future(self._draw(episode, request.turn))
        begun: web.StreamResponse | None = None
        waited = 0
        delivered = False
        try:
            wait = self.settings.keep_alive if request.stream else max(PATIENCE, self.settings.keep_alive)
            while not (await asyncio.wait({drawing}, timeout=wait))[0]:
                begun = begun or await _begin(http, request.stream)
                wait = self.settings.keep_alive
                await begun.write(api.waiting(request, waited) if request.stream else b" ")
                waited += 1
            replies = drawing.result()
            if not request.stream and begun is None:
                begun = web.Response(body=api.answer(request, replies), content_type="application/json")
                await begun.prepare(http)
            else:
                begun = begun or await _begin(http, request.stream)
                written = api.events(request, replies, waited) if request.stream else [api.answer(request, replies)]
                await begun.write(b"".join(written))
            await begun.write_eof()
            delivered = True
            return begun
        except RequestError as error:
            delivered = True
            if begun is None:
                raise
            if request.stream:
                await begun.write(api.error_event(error))
                await begun.write_eof()
            elif http.transport is not None:
                http.transport.abort()  # its status was sent as 200: a retry gets the error with its own
            return begun
        finally:
            if not drawing.done():
                drawing.cancel()
            elif not delivered and not drawing.cancelled() and drawing.exception() is None:
                assert self.policy is not None
                self.policy.undelivered(episode, [reply.node_id for reply in drawing.result()])

    async def _draw(self, episode: str, turn: TurnRequest) -> Sequence[TurnReply]:
        assert self.policy is not None, "the gateway has no policy"
        try:
            return await self.policy.reply(episode, turn)
        except PromptTooLong as error:
            words = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
            raise RequestError(str(error), code=error.code, param="messages", anthropic=words) from None
        except BadTurn as error:
            raise RequestError(str(error), code=error.code) from None
        except RecursionError:
            raise RequestError("The request is nested too deeply.") from None
        except EpisodeOver as error:
            message = str(error) or "The episode has ended."
            raise RequestError(message, HTTPStatus.GONE, "episode_over") from None
        except Stopping as error:
            raise RequestError(str(error), HTTPStatus.SERVICE_UNAVAILABLE, STOPPED) from None

    def _count(self, request: Request) -> web.Response:
        if self._renderer is None:
            raise RequestError("This gateway has no tokenizer to count with.", HTTPStatus.NOT_FOUND)
        try:
            ids = self._renderer.render(request.turn.messages, request.turn.tools)
        except BadTurn as error:
            raise RequestError(str(error)) from None
        return web.json_response({"input_tokens": self._images.count(ids, request.turn.messages)})

    def _models(self, path: str, anthropic: bool) -> web.Response:
        names = self._names
        wanted = path.removeprefix("/models").strip("/")
        if wanted and wanted not in names:
            raise RequestError(f"The model '{wanted[:60]}' does not exist.", HTTPStatus.NOT_FOUND, "model_not_found")
        if wanted:
            return web.json_response(_model(wanted, anthropic))
        models = [_model(name, anthropic) for name in names]
        if anthropic:
            return web.json_response({"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return web.json_response({"object": "list", "data": models})


def _model(name: str, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "april"}


ROUTES = ("/chat/completions", "/responses", "/messages", "/messages/count_tokens")


def _raise_open_files() -> None:
    """Raise this process's soft limit on open files: each connection and each program takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _begin(http: web.Request, stream: bool) -> web.StreamResponse:
    """Begin a response whose rest follows later."""
    kind = "text/event-stream" if stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    await response.prepare(http)
    return response


def _refusal(api: API, error: RequestError) -> web.Response:
    # OpenAI's and Anthropic's clients try 408, 409, 429 and 5xx again unless this header forbids it.
    headers = {} if error.code == STOPPED else {"x-should-retry": "false"}
    return web.Response(body=api.error(error), status=error.status, headers=headers, content_type="application/json")
