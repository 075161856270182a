"""Stand in for vLLM and SGLang servers where their builds need CUDA: the calls that april and a framework make of them,
over a Hugging Face model that samples one token a turn of the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Answer = dict[str, Any]


def adapted(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model with a LoRA adapter in PEFT's format: W + (alpha / r) B A."""
    weights: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if ".lora_A." in name:
            up = parts[name.replace(".lora_A.", ".lora_B.")]
            base = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weights[base] = weights[base] + config["lora_alpha"] / config["r"] * up @ down
    return weights


class ModelServer:
    """Answers on a thread of its own until `close`.

    Args:
        path: of the model.
    """

    def __init__(self, path: Path, slots: int = 8, context_length: int = 96) -> None:
        self.path, self.slots, self.context_length = path, slots, context_length
        self.model = self._policy(path)
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.asked = 0
        """Requests so far."""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def _policy(self, path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=self._middlewares())
        self._routes(app.router)
        self._runner = web.AppRunner(app)
        self._loop.run_until_complete(self._runner.setup())
        self._loop.run_until_complete(web.TCPSite(self._runner, "127.0.0.1", 0).start())
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        self.url = f"http://{self.address}"
        started.set()
        self._loop.run_forever()

    def _middlewares(self) -> list[Any]:
        """Return what runs around each request."""
        return []

    def _routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    def _get(self, router: web.UrlDispatcher, path: str, answer: Answer) -> None:
        async def get(request: web.Request) -> web.Response:
            return web.json_response(answer)

        router.add_get(path, get)

    async def _control(self, request: web.Request) -> web.Response:
        """What a server that has nothing to do answers at once."""
        return web.json_response({"success": True})

    async def _respond(self, request: web.Request, id: str, params: Answer, stream: bool, ids: list[int]) -> Any:
        self.asked += 1
        self.running.add(id)
        try:
            drawn: list[tuple[int, float]] = []
            if not stream:
                parts = [part async for part in self._tokens(id, ids, params)]
                drawn = [(token, logprob) for token, logprob, _ in parts if token >= 0]
                return web.json_response(self._event(drawn, drawn, parts[-1][2]))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for token, logprob, reason in self._tokens(id, ids, params):
                new = [(token, logprob)] * (token >= 0)
                drawn += new
                await response.write(f"data: {json.dumps(self._event(new, drawn, reason))}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.running.discard(id)

    def _event(self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None) -> Answer:
        raise NotImplementedError

    async def _tokens(self, id: str, ids: list[int], params: Answer) -> AsyncIterator[tuple[int, float, str | None]]:
        """Token, log-probability and why it is the last; a token of -1 is none."""
        eos = self.model.config.eos_token_id
        stops = {*params.get("stop_token_ids", ()), *([] if params.get("ignore_eos") else [eos])}
        budget = params.get("max_tokens") or params["max_new_tokens"]
        ids = list(ids)
        for number in range(budget):
            if id in self.aborted:
                yield -1, 0.0, "abort"
                return
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float() / (params["temperature"] or 1e-3)
            if number < params.get("min_tokens", 0):
                logits[eos] = -torch.inf
            logprobs = logits.log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1))
            ids.append(token)
            reason = "stop" if token in stops else "length" if number + 1 == budget else None
            yield token, float(logprobs[token]), reason
            if reason is not None:
                return
            await asyncio.sleep(0)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class VLLMServer(ModelServer):
    """Takes weights from the file of a state dict, by a call of its own: `/load`. Takes a LoRA adapter by SkyRL's call,
    and then samples only from the model with that adapter.

    Sleeping zeroes its weights. `broken` holds the calls that a real server's memory would not survive.
    """

    def _routes(self, router: web.UrlDispatcher) -> None:
        model = {"id": str(self.path), "root": str(self.path), "max_model_len": self.context_length}
        self._get(router, "/v1/models", {"data": [model]})
        self._get(router, "/server_info", {"vllm_config": self._config()})
        self._get(router, "/get_world_size", {"world_size": 1})
        self._get(router, "/health", {})
        self.asleep: set[str] = set()
        self.sleeps = 0
        self.broken: list[str] = []
        self.adapter: str | None = None
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            router.add_post(path, self._control)
        router.add_post("/sleep", self._sleep)
        router.add_post("/wake_up", self._wake_up)
        router.add_post("/load", self._load)
        router.add_post("/skyrl/v1/load_lora_adapter", self._load_adapter)
        router.add_post("/inference/v1/generate", self._generate)
        router.add_post("/inference/v1/abort_requests", self._abort)

    def _config(self) -> Answer:
        return {
            "model_config": {"logprobs_mode": "raw_logprobs"},
            "parallel_config": {"worker_extension_cls": ""},
            "device_config": {"device_type": "cuda"},
            "scheduler_config": {"max_num_seqs": self.slots},
            "cache_config": {},
        }

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.running:
            self.broken.append(f"sleep while {self.running} run")
        self.sleeps += not self.asleep
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.data.zero_()
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.asleep -= set(request.query.getall("tags", self.asleep))
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        if self.running or "weights" in self.asleep:
            self.broken.append(f"new weights while {self.running} run, and {self.asleep} sleep")
        self.model.load_state_dict(torch.load((await request.json())["path"]), strict=False)
        return web.json_response({})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        if self.running:
            self.broken.append(f"a new adapter while {self.running} run")
        call = await request.json()
        self.adapter = call["lora_name"]
        self.model.load_state_dict(adapted(self.path, Path(call["lora_path"])), strict=False)
        return web.json_response({"status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.update(id.removeprefix("generate-tokens-") for id in (await request.json())["request_ids"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> Any:
        body = await request.json()
        if self.asleep:
            self.broken.append(f"a request while {self.asleep} sleep")
        if not body["token_ids"]:
            return web.json_response({"error": "no token"}, status=400)
        if self.adapter is not None and body.get("model") != self.adapter:
            self.broken.append(f"a request for {body.get('model')}, which is not the adapter")
        id = body.get("request_id", f"framework-{self.asked}")
        return await self._respond(request, id, body["sampling_params"], body.get("stream", False), body["token_ids"])

    def _event(self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None) -> Answer:
        content = [{"token_id": id, "logprob": logprob, "token": ""} for id, logprob in new]
        ids = [id for id, _ in new]
        return {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}]}


class CompletionsServer(ModelServer):
    """vLLM as AReaL starts it: tokens over the API of completions, weights from a model's directory. It cannot abort a
    request but by its connection."""

    def _routes(self, router: web.UrlDispatcher) -> None:
        model = {"id": str(self.path), "root": str(self.path), "max_model_len": self.context_length}
        self._get(router, "/v1/models", {"data": [model]})
        self._get(router, "/health", {})
        for path in ("/areal_pause_generation", "/areal_continue_generation"):
            router.add_post(path, self._control)
        router.add_post("/areal_update_weights", self._load)
        router.add_post("/v1/completions", self._generate)

    async def _load(self, request: web.Request) -> web.Response:
        path = Path((await request.json())["model_path"])
        self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> Any:
        body = await request.json()
        assert body["return_tokens_as_token_ids"]
        assert body["logprobs"] == 0
        return await self._respond(request, f"{self.asked}", body, body.get("stream", False), body["prompt"])

    def _event(self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None) -> Answer:
        scores = {"tokens": [f"token_id:{id}" for id, _ in new], "token_logprobs": [logprob for _, logprob in new]}
        return {"choices": [{"index": 0, "text": "", "logprobs": scores, "finish_reason": reason}]}


class SGLangServer(ModelServer):
    """Takes weights from a model's directory, and their name, as SGLang does.

    Once it has loaded a LoRA adapter, it answers requests that name the latest one only.
    """

    weight_version = "default"
    adapter: str | None = None

    def _routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/model_info", self._model_info)
        server = {
            "internal_states": [{}],
            "max_running_requests": self.slots,
            "max_req_input_len": self.context_length,
            "incremental_streaming_output": True,
        }
        self._get(router, "/server_info", server)
        self._get(router, "/health", {})
        for path in ("/continue_generation", "/flush_cache"):
            router.add_post(path, self._control)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/update_weights_from_disk", self._load)
        router.add_post("/load_lora_adapter", self._load_adapter)
        router.add_post("/unload_lora_adapter", self._control)
        router.add_post("/generate", self._generate)
        router.add_post("/abort_request", self._abort)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self.path), "weight_version": self.weight_version})

    async def _pause(self, request: web.Request) -> web.Response:
        """As AReaL has it: whatever runs is aborted."""
        self.aborted |= self.running
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        assert not self.running, "weights change while requests run"
        call = await request.json()
        path, self.weight_version = Path(call["model_path"]), call.get("weight_version", self.weight_version)
        self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        return web.json_response({"success": True})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        assert not self.running, "an adapter changes while requests run"
        call = await request.json()
        self.use_adapter(call["lora_name"], Path(call["lora_path"]))
        return web.json_response({"success": True})

    def use_adapter(self, name: str, path: Path) -> None:
        self.adapter = name
        self.model.load_state_dict(adapted(self.path, path), strict=False)

    async def _abort(self, request: web.Request) -> web.Response:
        call = await request.json()
        self.aborted |= self.running if call.get("abort_all") else {call["rid"]}
        return web.json_response({})

    async def _generate(self, request: web.Request) -> Any:
        body = await request.json()
        if body.get("lora_path") != self.adapter:
            return web.json_response({"error": f"{body.get('lora_path')}, not {self.adapter}"}, status=400)
        id = body.get("rid", f"framework-{self.asked}")
        return await self._respond(request, id, body["sampling_params"], body.get("stream", False), body["input_ids"])

    def _event(self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None) -> Answer:
        return {
            "output_ids": [id for id, _ in new],
            "meta_info": {
                "completion_tokens": len(drawn),
                "weight_version": self.weight_version,
                "finish_reason": None
                if reason is None
                else {"type": reason, "matched": drawn[-1][0] if reason == "stop" else None},
                "output_token_logprobs": [(logprob, id, None) for id, logprob in new],
            },
        }
