"""SGLang's server as an engine: token ids in and out over `/generate`.

Written to and run against SGLang 0.5.23. `--incremental-streaming-output` is worth having: without it every event
repeats the whole response. `april.engines.servers.launch.launch_sglang` starts a server so.

SGLang reports log-probabilities after temperature and before truncation. With `top_k` it can report those of the
distribution tokens are drawn from as well, and is asked to; `top_p` or `min_p` without `top_k` are refused, unless the
whole vocabulary fits what the server can report.

`top_p` is taken of the whole distribution here, not of what `top_k` leaves.

Weights come from a directory of safetensors the server can read, or over a broadcast group (`broadcast.py`).
It must not speculate: on some devices SGLang then takes the likeliest token whatever the temperature, on all of them it
ignores `min_p`, and no field of its responses shows that.
KV caches of different versions never mix: every request names its weights in the cache's extra key.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from april.engines.cuda_ipc import sglang_tensors
from april.engines.fit import NO_IMAGES
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.local_model import local_vocab_size
from april.engines.servers.sent_images import SentImages
from april.engines.servers.server import ServerEngine
from april.engines.servers.server_api import Pausing, ServerInfo, Sleeping
from april.engines.servers.server_routes import FLAG, ServerRoutes
from april.engines.servers.sglang_images import sglang_fields, unfit_for_images
from april.engines.servers.stream import Delta, Finish, Stream
from april.engines.weight_transfer import Bucket, Exported, Meeting, Receiver, Sending, Share, directory_of
from april.images.source import ImageError
from april.rollout.engine import Capacity, EngineError
from april.rollout.sampling import FinishReason, SamplingParams

log = logging.getLogger(__name__)

FINISH: dict[str, Finish] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": "abort"}


class SGLangFinish(msgspec.Struct, gc=False):
    type: str
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, gc=False):
    completion_tokens: int
    weight_version: str
    prompt_tokens: int | None = None
    finish_reason: SGLangFinish | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[dict[str, Any]] | None = None
    routed_experts: str | None = None


class SGLangEvent(msgspec.Struct, gc=False):
    """What april reads of an event; an error has no `meta_info`."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: Any = None


decode = msgspec.json.Decoder(SGLangEvent).decode

WEIGHTS = ["weights"]
KV_CACHE = ["kv_cache", "cuda_graph"]
"""Memory by the server's names. CUDA graphs are taken back with the KV cache that they refer to."""
IDLE_SECONDS = 30.0
"""Seconds that the server may take to be idle before it sleeps."""


async def connect_sglang(
    url: str, routes: ServerRoutes | None = None, images: SentImages | None = None, **settings: Any
) -> ServerEngine:
    """Connect to a running SGLang server; see `ServerEngine` for the settings.

    Args:
        routes: routes to request, for router replay.
        images: images of prompts; without, prompts with images are refused.

    Raises:
        EngineError: no server answers, or it was started without something that is needed.
    """
    return await ServerEngine.connect(url, functools.partial(SGLang, routes=routes, images=images), **settings)


class SGLang:
    """API of SGLang's server."""

    kind = "SGLang"
    generate_path = "/generate"
    flag = "--enable-memory-saver"
    keeping = "--enable-weights-cpu-backup"
    """Option with which a server that sleeps keeps its weights in host memory."""
    tested: tuple[str, ...] = ("0.5.23",)

    def __init__(self, http: HTTPClient, routes: ServerRoutes | None = None, images: SentImages | None = None) -> None:
        self._http = http
        self.routes = routes
        self.images = images
        self._unfit_for_images: str | None = NO_IMAGES
        self._vocab_size = 0
        self._process: Any = None
        """Measured seconds of its process's start, by which a restart is recognised."""
        self._group: str | None = None
        """The name of the group over which that process was sent weights."""
        self._updating = False
        """Whether a weight update was begun in that process that has not been ended."""

    @property
    def pausing(self) -> Pausing:
        return self

    @property
    def sleeping(self) -> Sleeping:
        return self

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        model = await self._http.get("/model_info")
        server = await self._http.get("/server_info")
        state = server["internal_states"][0]
        if (process := server.get("startup_time")) != self._process:
            self._process, self._updating, self._group = process, False, None
        if server.get("incremental_streaming_output") is False:
            log.warning(
                "SGLang at %s repeats the whole response in every event, which takes this machine many times the work: "
                "start it with --incremental-streaming-output",
                self._http.url,
            )
        if algorithm := server.get("speculative_algorithm"):
            raise EngineError(
                f"SGLang at {self._http.url} speculates ({algorithm}), and is not known to draw drafted tokens from "
                "its model's distribution: start it without --speculative-algorithm (docs/engines.md, Speculation)"
            )
        if self.routes and not server.get("enable_return_routed_experts"):
            raise EngineError(
                f"SGLang at {self._http.url} returns no routes: start it with {FLAG}, or turn router replay off"
            )
        self._workers = server.get("tp_size") or 1
        self._unfit_for_images = NO_IMAGES if self.images is None else unfit_for_images(self.images, model, server)
        self._mask_tokens = server.get("sampling_mask_max_tokens") or 0
        capacity = Capacity(
            slots=state.get("effective_max_running_requests_per_dp") or server["max_running_requests"],
            # A resumed sample's response so far is part of the input, so the shorter limit, of inputs, holds.
            context_length=server["max_req_input_len"],
            kv_tokens=server.get("max_total_num_tokens"),
        )
        self._vocab_size = vocab_size or local_vocab_size(model["model_path"]) or 0
        releases = None if server.get("device") == "cpu" else bool(server.get("enable_memory_saver"))
        return ServerInfo(capacity, self._vocab_size, model["weight_version"], releases)

    def _top_k(self, sampling: SamplingParams) -> int | None:
        """The `top_k` that makes the server report the drawn-from distribution; None where it does so anyway."""
        if sampling.temperature == 0 or (sampling.top_p == 1 and not sampling.top_k and not sampling.min_p):
            return None
        # With top_p or min_p alone, a top_k of the whole vocabulary truncates nothing.
        return min(sampling.top_k or self._vocab_size, self._vocab_size)

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        top_k = self._top_k(sampling)
        if top_k is None or top_k <= self._mask_tokens:
            return None
        raise_limit = f"set top_k to at most {self._mask_tokens} (or raise the server's --sampling-mask-max-tokens)"
        return (
            "cannot report log-probabilities of the distribution tokens are drawn from with "
            f"top_p = {sampling.top_p:g}, top_k = {sampling.top_k}, min_p = {sampling.min_p:g}: "
            f"{raise_limit if self._mask_tokens else 'use a newer SGLang'}, or sample without truncation"
        )

    def unsupported_images(self) -> str | None:
        return self._unfit_for_images

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        assert self.images is not None, "prompts with images are refused when they are submitted"
        return sglang_fields(self.images, stream.token_ids, stream.features, salt)

    def _require_same_prompt(self, images: SentImages, stream: Stream, prompt_tokens: int | None) -> None:
        """Check that the server has expanded the placeholders of a request's images as april has."""
        expected = len(stream.token_ids) - (stream.received - stream.begun)
        if prompt_tokens != expected:
            raise ImageError(
                f"{self.kind} at {self._http.url} makes {prompt_tokens} tokens of a prompt with images where the image "
                f"processor of {images.model} makes {expected}: start the server with that model"
            )

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        sampling = stream.sampling
        top_k = self._top_k(sampling)
        greedy = sampling.temperature == 0
        body: dict[str, Any] = {
            "rid": stream.request_id,
            "input_ids": stream.token_ids,
            "stream": True,
            "return_logprob": True,
            # Whatever happens to the prefix cache, KV of one version is never found under another.
            "extra_key": salt,
            "sampling_params": {
                "max_new_tokens": stream.budget_left,
                "temperature": sampling.temperature,
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": top_k or -1,
                "min_p": 0.0 if greedy else sampling.min_p,
                "repetition_penalty": 1.0,
                "stream_interval": stream.interval,
                "sampling_seed": stream.seed % 2**63,
                "stop_token_ids": list(sampling.stop_token_ids),
                # With it, SGLang ignores our stop tokens as well; without it, the model's own end tokens stop too.
                "ignore_eos": not sampling.stop_token_ids,
                "skip_special_tokens": False,
            },
        }
        if top_k is not None and top_k > 1:
            body["return_sampling_mask"] = True
        if self.routes is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.routes.start(stream)}
        return body

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        decoded = decode(event)
        meta, output_ids = decoded.meta_info, decoded.output_ids
        if decoded.error is not None or meta is None:
            raise RequestError(str(decoded.error or "an event without meta_info came"))
        ended = meta.finish_reason
        reason = ended.type if ended else None
        if self.images is not None and stream.features and meta.completion_tokens:
            self._require_same_prompt(self.images, stream, meta.prompt_tokens)
        if reason is not None and reason not in FINISH:
            raise RequestError(f"the request ended with {reason!r}")
        if ended is not None and reason == "abort" and ended.status_code:
            raise RequestError(f"HTTP {ended.status_code}: {ended.message}")
        new = meta.completion_tokens - (stream.received - stream.begun)
        # An event may repeat earlier tokens: all of them without --incremental-streaming-output, and the last token in
        # the farewell of a request that was aborted while it waited. The count gives the number of new tokens.
        if new < 0 or new > len(output_ids):
            raise RequestError(f"{new} tokens are new in an event that holds {len(output_ids)}")
        spans = [(span["version"], span["start"], span["end"]) for span in meta.weight_versions or ()]
        finish = FINISH[reason] if reason else None
        # The server has stopped at an end token of the model that is no stop token of the sample.
        if finish is FinishReason.STOP and ended is not None and ended.matched not in stream.sampling.stop_token_ids:
            finish = "again"
        encoded = meta.routed_experts if finish is not None else None
        routes = None if self.routes is None else self.routes.of_sglang(encoded, stream, finish)
        if not new:
            return Delta((), (), finish, spans=spans, routes=routes)
        ids = output_ids[-new:]
        scored = meta.output_token_logprobs[-new:]
        if [entry[1] for entry in scored] != ids:
            raise RequestError("the log-probabilities are of other tokens than those sampled")
        drawn = meta.output_token_sampling_logprobs
        logprobs = drawn[-new:] if drawn is not None else [entry[0] for entry in scored]
        return Delta(ids, logprobs, finish, meta.weight_version, spans, routes)

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        # It takes one request a call, or all. Calls by the hundred each need a connection, as streams hold the others.
        calls = [{"abort_all": True}] if alone else [{"rid": id} for id in request_ids]
        await asyncio.gather(*(self._http.post("/abort_request", call) for call in calls))
        return True

    async def freeze(self) -> None:
        await self._http.post("/pause_generation", {"mode": "in_place"})

    async def thaw(self) -> None:
        await self._http.post("/continue_generation", {})

    async def version(self) -> str:
        return str((await self._http.get("/server_info"))["version"])

    async def sleep(self) -> None:
        # The server dies if it is not idle, and a health check runs a request that outlives its answer. This call waits
        # until nothing runs, and fails after `timeout` seconds.
        await self._http.post(f"/flush_cache?timeout={IDLE_SECONDS:g}")
        await self._http.post("/release_memory_occupation", {"tags": [*WEIGHTS, *KV_CACHE]})

    async def wake_weights(self) -> None:
        await self._http.post("/resume_memory_occupation", {"tags": WEIGHTS})

    async def wake_kv_cache(self) -> None:
        await self._http.post("/resume_memory_occupation", {"tags": KV_CACHE})

    async def prompt_logprobs(self, token_ids: Sequence[int], salt: str) -> list[float]:
        sampling = {"max_new_tokens": 1, "temperature": 1.0, "skip_special_tokens": False}
        body = {"input_ids": list(token_ids), "sampling_params": sampling, "extra_key": salt}
        answer = await self._http.post("/generate", body | {"return_logprob": True, "logprob_start_len": 0})
        scores = answer["meta_info"]["input_token_logprobs"][1:]
        if [score[1] for score in scores] != list(token_ids[1:]):
            raise RequestError("/generate: the log-probabilities are of other tokens than those of the prompt")
        return [score[0] for score in scores]

    async def load(self, version: int, weights: Any, receiver: Callable[..., Receiver]) -> None:
        await self._end_failed_update()
        options = {
            "weight_version": str(version),
            # It would fail an update while the server tidies up after the last request. The salt keeps old KV out;
            # flushing only makes room, and may fail.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        if isinstance(weights, Sending | Share):
            await weights.take(self._receiver(options, receiver))
        else:
            await self._http.post("/update_weights_from_disk", {"model_path": directory_of(weights), **options})

    async def reset_caches(self) -> None:
        with suppress(RequestError):
            await self._http.post("/flush_cache")

    def _receiver(self, options: dict[str, Any], receiver: Callable[..., Receiver]) -> Receiver:
        post = self._http.post

        async def join(meeting: Meeting) -> None:
            await self._leave_group()
            self._group = meeting.name
            group = {
                "master_address": meeting.address,
                "master_port": meeting.port,
                "rank_offset": meeting.first_rank,
                "world_size": meeting.world_size,
                "group_name": meeting.name,
                "backend": meeting.backend,
            }
            await post("/init_weights_update_group", group)

        def receive(meeting: Meeting, bucket: Bucket) -> Awaitable[Any]:
            body = {**asdict(bucket), "group_name": meeting.name, "load_format": "flattened_bucket", **options}
            return post("/update_weights_from_distributed", body)

        def open_bucket(exported: Exported, gpus: tuple[str, ...]) -> Awaitable[Any]:
            tensors = sglang_tensors(exported, gpus)
            body = {"serialized_named_tensors": tensors, "load_format": "flattened_bucket", **options}
            return post("/update_weights_from_tensor", body)

        return receiver(
            self._workers,
            join,
            begin=self._begin_update,
            receive=receive,
            end=self._end_update,
            open=open_bucket,
        )

    async def _end_failed_update(self) -> None:
        """End an update that failed halfway: the server refuses a second one."""
        if self._updating:
            self._updating = False
            with suppress(RequestError):  # its beginning has not reached the server
                await self._http.post("/end_weight_update", {})

    async def _begin_update(self) -> None:
        self._updating = True
        await self._http.post("/begin_weight_update", {})

    async def _end_update(self) -> None:
        await self._http.post("/end_weight_update", {})
        self._updating = False

    async def _leave_group(self) -> None:
        """Free the group of the last update; a trainer that makes a new group has left it."""
        if self._group is not None:
            name, self._group = self._group, None
            with suppress(RequestError):  # the server may not have joined it
                await self._http.post("/destroy_weights_update_group", {"group_name": name})

    async def label(self) -> str | None:
        return str((await self._http.get("/model_info"))["weight_version"])
