"""vLLM's server as an engine: token ids in and out over `/inference/v1/generate`.

Written to and run against vLLM 0.32. The server needs `VLLM_SERVER_DEV_MODE=1` (weight updates, pause),
`--enable-scale-out` (token ids in and out) and `--logprobs-mode processed_logprobs` (log-probabilities of the
distribution tokens are drawn from); `april.engines.servers.launch.launch_vllm` starts one so.

Speculation (`--speculative-config`) changes no distribution: log-probabilities are the model's own, not the draft's.

Weights come from a directory of safetensors the server can read, or over a broadcast group (`broadcast.py`). LoRA
adapters in such a directory are enough: april's worker extension merges them into the policy they were begun with.
KV caches of different versions never mix: every request names its weights in the cache's salt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from april.engines.cuda_ipc import vllm_update
from april.engines.fit import NO_IMAGES
from april.engines.servers.client import HTTPClient, RequestError
from april.engines.servers.local_model import has_tied_head, local_vocab_size
from april.engines.servers.sent_images import SentImages
from april.engines.servers.server import ServerEngine
from april.engines.servers.server_api import Pausing, ServerInfo, Sleeping
from april.engines.servers.server_routes import FLAG, ServerRoutes
from april.engines.servers.stream import Delta, Finish, Stream
from april.engines.servers.vllm_images import vllm_features
from april.engines.weight_transfer import Receiver, Sending, Share, directory_of
from april.rollout.engine import Capacity, EngineError
from april.rollout.sampling import FinishReason, SamplingParams

OWN_PIXELS = "--no-mm-device-do-normalize"
"""Option of a server that takes pixels as the image processor returns them; without it, vLLM normalises pixels."""
FINISH: dict[str, Finish] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": "abort"}


class Score(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class VLLMScores(msgspec.Struct, gc=False):
    content: list[Score] | None = None


class VLLMChoice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: VLLMScores | None = None
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] | None = None
    routed_experts: str | None = None


class VLLMEvent(msgspec.Struct, gc=False):
    """What april reads of an event. The server sends each log-probability twice, with its rank; that is skipped."""

    choices: list[VLLMChoice] = []
    error: Any = None


decode = msgspec.json.Decoder(VLLMEvent).decode


def sampling_settings(stream: Stream) -> dict[str, Any]:
    """Return the sampling settings of a request, which have the same names in vLLM's APIs of tokens and of texts."""
    sampling = stream.sampling
    return {
        "max_tokens": stream.budget_left,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # No seed: vLLM would draw what follows an interrupt with the numbers that drew the first tokens, leave its fast
        # samplers, and die of it on a CPU when a prompt is prefilled in parts (0.32).
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
    }


async def connect_vllm(
    url: str,
    keeps_weights: bool = False,
    routes: ServerRoutes | None = None,
    images: SentImages | None = None,
    **settings: Any,
) -> ServerEngine:
    """Connect to a running vLLM server; see `ServerEngine` for the settings.

    Args:
        keeps_weights: asleep, it keeps its weights in host memory: not all of them are sent.
        routes: routes to request, for router replay.
        images: images of prompts; without, prompts with images are refused.

    Raises:
        EngineError: no server answers, or it was started without something that is needed.
    """
    api = functools.partial(VLLM, keeps_weights=keeps_weights, routes=routes, images=images)
    return await ServerEngine.connect(url, api, **settings)


class VLLM:
    """API of vLLM's server."""

    kind = "vLLM"
    generate_path = "/inference/v1/generate"
    flag = "--enable-sleep-mode"
    tested: tuple[str, ...] = ("0.32.",)

    def __init__(
        self,
        http: HTTPClient,
        keeps_weights: bool = False,
        routes: ServerRoutes | None = None,
        images: SentImages | None = None,
    ) -> None:
        self._http = http
        # Level 2 discards the weights, level 1 moves them to host memory.
        self._level = 1 if keeps_weights else 2
        self._process: str | None = None
        """The server's name of its process, which a restart changes."""
        self._updating = False
        """Whether a weight update was started in that process that has not been finished."""
        self.routes = routes
        self.images = images

    def __repr__(self) -> str:
        return f"{self.kind} at {self._http.url}"

    @property
    def pausing(self) -> Pausing:
        return self

    @property
    def sleeping(self) -> Sleeping:
        return self

    async def describe(self, vocab_size: int | None) -> ServerInfo:
        model = (await self._http.get("/v1/models"))["data"][0]
        self._model, self._path = model["id"], model["root"]
        try:
            config = (await self._http.get("/server_info?config_format=json"))["vllm_config"]
        except RequestError as error:
            raise EngineError(
                f"{self!r} cannot take new weights: start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            ) from error
        if (process := config.get("instance_id")) != self._process:
            self._process, self._updating = process, False
        await self._require_token_ids()
        self._workers = (await self._http.get("/get_world_size"))["world_size"]
        self._processed = config["model_config"]["logprobs_mode"] == "processed_logprobs"
        self._extended = config["parallel_config"]["worker_extension_cls"].endswith("vllm_worker.WorkerExtension")
        multimodal = config["model_config"].get("multimodal_config")
        self._reads_images = multimodal is not None
        self._normalises = bool((multimodal or {}).get("mm_device_do_normalize"))
        on_cpu = "cpu" in config["device_config"].values()
        if self.routes and not (config.get("aux_output_config") or {}).get("enable_return_routed_experts"):
            raise EngineError(f"{self!r} returns no routes: start it with {FLAG}, or turn router replay off")
        if not self._extended and on_cpu and has_tied_head(model["root"]):
            raise EngineError(
                f"{self!r} runs on a CPU, where vLLM keeps the old output layer of a model with tied embeddings when "
                "weights change: start it with --worker-extension-cls april.engines.servers.vllm_worker.WorkerExtension"
            )
        self._speculates = self._speculation(config.get("speculative_config"), on_cpu)
        capacity = Capacity(
            slots=config["scheduler_config"]["max_num_seqs"],
            context_length=model["max_model_len"],
            kv_tokens=config["cache_config"].get("kv_cache_size_tokens"),
        )
        vocab_size = vocab_size or local_vocab_size(model["root"]) or 0
        releases = None if on_cpu else bool(config["model_config"].get("enable_sleep_mode"))
        return ServerInfo(capacity, vocab_size, await self.label(), releases)

    def _speculation(self, settings: dict[str, Any] | None, on_cpu: bool) -> bool:
        """Whether the server speculates.

        Raises:
            EngineError: its tokens would not be drawn from the model's distribution.
        """
        if settings is None:
            return False
        if settings.get("rejection_sample_method") == "synthetic":
            raise EngineError(
                f"{self!r} accepts drafts at rates that it was given, whatever its model says of them: start it "
                'without "rejection_sample_method": "synthetic" in --speculative-config'
            )
        if on_cpu and not self._extended:
            raise EngineError(
                f"{self!r} speculates on a CPU, where vLLM draws drafted tokens at a temperature that it never sets: "
                "start it with --worker-extension-cls april.engines.servers.vllm_worker.WorkerExtension, or without "
                "--speculative-config"
            )
        return True

    async def _require_token_ids(self) -> None:
        # An empty prompt is invalid, so nothing is generated; only a server without the path answers 403 or 404.
        status, _ = await self._http.status("POST", self.generate_path, {"token_ids": []})
        if status in (403, 404):
            raise EngineError(f"{self!r} does not take token ids: start it with --enable-scale-out")

    def unsupported_sampling(self, sampling: SamplingParams) -> str | None:
        if self._speculates and sampling.min_p:
            return (
                f"takes no min_p while it speculates, and min_p = {sampling.min_p:g}: set it to 0, or start the server "
                "without --speculative-config"
            )
        plain = sampling.temperature == 1 and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
        if self._processed or plain or sampling.temperature == 0:
            return None
        return (
            "reports log-probabilities before temperature and truncation, not those of the distribution tokens are "
            "drawn from: start it with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p, "
            "top_k and min_p"
        )

    def unsupported_images(self) -> str | None:
        if self.images is None:
            return NO_IMAGES
        if reason := self.images.other_model(self._path):
            return reason
        if not self._reads_images:
            return f"serves {self._model}, which reads no images: start it with the policy, {self.images.model}"
        if self._normalises:
            return f"would normalise pixels that april has normalised: start it with {OWN_PIXELS}"
        return None

    def image_fields(self, stream: Stream, salt: str) -> dict[str, Any]:
        assert self.images is not None, "prompts with images are refused when they are submitted"
        return {"features": vllm_features(self.images, stream.features, salt)}

    def body(self, stream: Stream, salt: str) -> dict[str, Any]:
        routes = {} if self.routes is None else {"routed_experts_prompt_start": self.routes.start(stream)}
        return {
            "model": self._model,
            "request_id": stream.request_id,
            "token_ids": stream.token_ids,
            "stream": True,
            # Whatever happens to the prefix cache, KV of one version is never found under another.
            "cache_salt": salt,
            "sampling_params": {
                **sampling_settings(stream),
                "stream_interval": stream.interval,
                "detokenize": False,
                **routes,
            },
        }

    def read(self, event: bytes, stream: Stream) -> Delta | None:
        decoded = decode(event)
        if decoded.error is not None:
            raise RequestError(str(decoded.error))
        if not decoded.choices:
            return None
        choice = decoded.choices[0]
        ids = choice.token_ids or []
        content = (choice.logprobs and choice.logprobs.content) or []
        if [score.token_id for score in content] != ids:
            raise RequestError("the log-probabilities are of other tokens than those sampled")
        reason = choice.finish_reason
        if reason is not None and reason not in FINISH:
            raise RequestError(f"the request ended with {reason!r}")
        spans = [(span["version"], span["start"], span["end"]) for span in choice.weight_versions or ()]
        logprobs = [score.logprob for score in content]
        finish = FINISH[reason] if reason else None
        routes = None if self.routes is None else self.routes.of_vllm(choice.routed_experts, stream, finish)
        return Delta(ids, logprobs, finish, spans=spans, routes=routes)

    async def abort(self, request_ids: Sequence[str], alone: bool) -> bool:
        # The server puts this prefix before the ids of requests.
        await self._http.post(
            "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{id}" for id in request_ids]}
        )
        return True

    async def freeze(self) -> None:
        await self._http.post("/pause?mode=keep&clear_cache=false")

    async def thaw(self) -> None:
        await self._http.post("/resume")

    async def version(self) -> str:
        return str((await self._http.get("/version"))["version"])

    async def sleep(self) -> None:
        await self._http.post(f"/sleep?level={self._level}&mode=abort")
        await self._require_sleeping(True)

    async def wake_weights(self) -> None:
        await self._http.post("/wake_up?tags=weights")
        # Until the KV cache is there as well, requests would be computed without one.
        await self._require_sleeping(True)

    async def wake_kv_cache(self) -> None:
        await self._http.post("/wake_up?tags=kv_cache")
        await self._require_sleeping(False)

    async def _require_sleeping(self, expected: bool) -> None:
        """Check the state after a call: the server only warns of calls that it ignores."""
        if (await self._http.get("/is_sleeping"))["is_sleeping"] is not expected:
            raise RequestError(f"/is_sleeping: {not expected} where {expected} was expected")

    async def prompt_logprobs(self, token_ids: Sequence[int], salt: str) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": self._model, "token_ids": list(token_ids), "cache_salt": salt, "sampling_params": sampling}
        answer = await self._http.post(self.generate_path, body)
        scores = answer["prompt_logprobs"][1:]
        return [score[str(token)]["logprob"] for token, score in zip(token_ids[1:], scores, strict=True)]

    async def load(self, version: int, weights: Any, receiver: Callable[..., Receiver]) -> None:
        await self._end_failed_update()
        if isinstance(weights, Sending | Share):
            await weights.take(self._receiver(version, receiver))
        else:
            directory = directory_of(weights)
            if (Path(directory) / "adapter_config.json").exists():
                await self._merge_adapters(directory)
            else:
                await self._http.post(
                    "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}}
                )
            if self._extended:
                await self._http.post("/collective_rpc", {"method": "refresh_output_layer"})
            # Last: a label must never name weights that failed to load.
            await self._http.post("/update_weight_version", {"new_version": str(version)})

    async def _merge_adapters(self, directory: str) -> None:
        if not self._extended:
            raise EngineError(
                f"{self!r} cannot merge adapters: start it with --worker-extension-cls "
                'april.engines.servers.vllm_worker.WorkerExtension, or set engine.weight_transfer = "disk"'
            )
        await self._http.post("/collective_rpc", {"method": "merge_adapters", "args": [directory]})

    async def reset_caches(self) -> None:
        await self._http.post("/reset_prefix_cache")

    def _receiver(self, version: int, receiver: Callable[..., Receiver]) -> Receiver:
        post = self._http.post
        return receiver(
            self._workers,
            join=lambda meeting: post("/init_weight_transfer_engine", {"init_info": asdict(meeting)}),
            begin=self._start_update,
            receive=lambda meeting, bucket: post("/update_weights", {"update_info": asdict(bucket)}),
            end=lambda: self._finish_update({"weight_version": str(version)}),
            nccl_version=self._nccl_version,
            prepare=lambda: post("/init_weight_transfer_engine", {"init_info": {"packed": True}}),
            open=lambda exported, gpus: post("/update_weights", {"update_info": vllm_update(exported)}),
        )

    async def _end_failed_update(self) -> None:
        """End an update that failed halfway: the server refuses a second one, and layers hold parts of its weights."""
        if self._updating:
            # Workers that have failed in it have left it, and start it again, so that all of them can finish it.
            for path in ("/finish_weight_update", "/start_weight_update"):
                with suppress(RequestError):
                    await self._http.post(path)
            await self._finish_update({})

    async def _start_update(self) -> None:
        self._updating = True
        await self._http.post("/start_weight_update")

    async def _finish_update(self, body: dict[str, str]) -> None:
        await self._http.post("/finish_weight_update", body)
        self._updating = False

    async def _nccl_version(self) -> str | None:
        answer = await self._http.post("/collective_rpc", {"method": "nccl_version"})
        return next(filter(None, answer["results"]), None)

    async def label(self) -> str | None:
        return str((await self._http.get("/weight_info"))["weight_version"])
