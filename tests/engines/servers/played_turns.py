"""Servers without a model that share a device with a trainer, and enforce the strictest rules of vLLM and SGLang.

- A request for tokens while the server sleeps is a violation, and fails. So is a health check of SGLang.
- Asleep, a server forgets its weights and its KV cache.
- It dies if it is put to sleep while a request runs, and if memory is taken back that was not released.
- It dies while starting if the device has too little free memory, or if memory is taken or freed at that time.
- An update in buckets is begun once and ended once: a second beginning is refused, and so is a bucket outside of it.

A `Device` counts the memory that servers and trainer hold. Weights are the text of a checkpoint, and scores follow from
that text, so lost weights show in the scores.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import io
import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from april.engines.cuda_ipc import DEVICE
from april.engines.servers.launch import Launch
from april.engines.start_gate import StartGate
from tests.engines.ipc_files import named_tensors

PLAYBACK = Path(__file__).parents[3] / "benchmarks" / "playback.py"
spec = importlib.util.spec_from_file_location("playback", PLAYBACK)
assert spec is not None
assert spec.loader is not None
playback = importlib.util.module_from_spec(spec)
spec.loader.exec_module(playback)

Crash = Literal["no", "die", "refuse"]
WEIGHTS, KV_CACHE, CONTEXT = 30, 50, 2
"""Bytes that a server holds: for weights, for the KV cache, and always while it runs."""
TEXT = "text"
"""Name of the tensor of an update in buckets, whose bytes are the weights' text; others are ignored."""
LOST = "lost"
"""The weights of a server that has slept and was not updated."""


class Refused(Exception):
    """A call that the server answers with an error."""


class Device:
    """Memory of a device: who holds how much, and what must not happen."""

    def __init__(self, total: int = 100) -> None:
        self.total = total
        self.held: dict[str, int] = {}
        self.starting: set[str] = set()
        self.violations: list[str] = []

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def hold(self, name: str, size: int) -> None:
        """Change what `name` holds."""
        if size == self.held.get(name, 0):
            return
        if others := self.starting - {name}:
            self.violations.append(f"{name} changed its memory while {others} started")
        self.held[name] = size
        if self.used > self.total:
            self.violations.append(f"out of memory: {self.held}")


def score(weights: str, token: int) -> float:
    """The log-probability of a token under some weights."""
    return -1.0 - hashlib.blake2b(f"{weights}:{token}".encode()).digest()[0] / 16


class PlayedServer:
    """One server and its process, as `april.engines.servers.launch.Server`.

    Args:
        kind: vllm or sglang.
        clock: decode steps of all servers.
        crashes: called before and after each control call with its path; the server dies, or answers with an error.
        frees: share of its memory that a sleeping server frees.
        gpu: UUID of its GPU.
    """

    def __init__(
        self,
        kind: str,
        clock: Any,
        device: Device,
        gate: StartGate,
        initial: str,
        crashes: Callable[[str], Crash] = lambda _: "no",
        name: str = "played-0",
        frees: float = 1.0,
        gpu: str = "",
    ) -> None:
        self.name = name
        self.how = Launch(log_dir="", gate=gate, gpus=(gpu,) if gpu else ())
        self.down: str | None = "it has not been started yet"
        self.given_up = False
        self.port = 0
        self.weights = LOST
        self.asleep: set[str] = set()
        self.buckets: dict[str, Any] | None = None
        """Tensors of the update that was begun and not ended."""
        self.updates: list[str] = []
        """How it was updated: "disk" or "ipc"."""
        self.crashes = crashes
        self.deaths = 0
        self.refused: list[str] = []
        """Paths of calls that it refused."""
        self.fails_updates = 0
        """Updates that report success and change nothing, from now on."""
        self._kind, self._clock, self._device, self._gate = kind, clock, device, gate
        self._initial, self._frees = initial, frees
        self._server: asyncio.Server | None = None
        self._connections: set[Any] = set()
        self._life: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start once the gate is open."""
        async with self._gate.start():
            if self._device.total - self._device.used < WEIGHTS + KV_CACHE + CONTEXT:
                self._device.violations.append(f"{self.name} starts where {self._device.held} is held")
            self._device.starting.add(self.name)
            await asyncio.sleep(0.001)
            self.replica = _KINDS[self._kind](self, self._clock)
            self.weights, self.asleep, self.buckets = self._initial, set(), None
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._connection, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]
            self._hold()
            self._device.starting.discard(self.name)
            self.down = None

    def _connection(self) -> Any:
        connection = _Connection(self.replica)
        self._connections.add(connection)
        return connection

    def _hold(self) -> None:
        kept = round((1 - self._frees) * (WEIGHTS + KV_CACHE)) if self.asleep == {"weights", "kv_cache"} else 0
        sizes = {"weights": WEIGHTS, "kv_cache": KV_CACHE}
        held = sum(size for tag, size in sizes.items() if tag not in self.asleep)
        self._device.hold(self.name, CONTEXT + max(held, kept))

    def die(self, reason: str) -> None:
        """End the process; it is started again when the gate is open."""
        if self.down is not None:
            return
        self.down = f"{self.name} died: {reason}"
        self.deaths += 1
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            with suppress(AttributeError):
                connection.transport.abort()
        self._connections.clear()
        self._device.held[self.name] = 0
        self._life = asyncio.create_task(self.start())

    async def kill(self) -> None:
        self.die("killed")

    async def close(self) -> None:
        """End the process for good."""
        self.die("closed")
        if self._life is not None:
            self._life.cancel()
            with suppress(asyncio.CancelledError):
                await self._life
        if self.down is None and self._server is not None:
            self._server.close()
        self._device.held[self.name] = 0
        self._device.starting.discard(self.name)

    def release(self, tags: Sequence[str]) -> None:
        if self.replica.streams:
            self._device.violations.append(f"{self.name} was put to sleep while requests ran")
            self.die("it was not idle")
            return
        self.asleep |= set(tags)
        if "weights" in self.asleep:
            self.weights = LOST
        self._hold()

    def resume(self, tags: Sequence[str]) -> None:
        if not self.asleep.issuperset(tags):
            self._device.violations.append(f"{self.name}: {tags} were not released")
            self.die(f"KeyError: {tags}")
            return
        self.asleep -= set(tags)
        self._hold()

    def update(self, directory: str) -> None:
        assert self.buckets is None, "weights are loaded within another update"
        self._updated("disk", (Path(directory) / "model.safetensors").read_text())

    def begin_update(self) -> None:
        if self.buckets is not None:
            raise Refused("a weight update is already active")
        self.buckets = {}

    def bucket(self, tensors: dict[str, Any]) -> None:
        if self.buckets is None:
            raise Refused("no weight update is active")
        self.buckets |= tensors

    def end_update(self) -> None:
        if self.buckets is None:
            raise Refused("no weight update is active")
        text, self.buckets = self.buckets.get(TEXT), None
        self._updated("ipc", LOST if text is None else bytes(text.tolist()).decode())

    def _updated(self, how: str, weights: str) -> None:
        if "weights" in self.asleep:
            self._device.violations.append(f"{self.name} was updated without memory for weights")
        self.updates.append(how)
        if self.fails_updates:
            self.fails_updates -= 1
        else:
            self.weights = weights

    def may_generate(self) -> bool:
        if self.asleep:
            self._device.violations.append(f"{self.name} got a request while {self.asleep} slept")
        return not self.asleep


class _Connection(playback.Connection):  # type: ignore[misc,name-defined]
    """As playback's, with requests for scores, refused requests and crashes."""

    def request(self, method: str, path: str, body: Any) -> None:
        server: PlayedServer = self.replica.server
        if path == self.replica.generate_path and body.get("sampling_params"):
            if not server.may_generate():
                self.answer(b"HTTP/1.1 503 Service Unavailable\r\n", {})
            elif body.get("stream"):
                self.replica.generate(self, body)
            else:
                ids = body.get("token_ids") or body["input_ids"]
                self.answer(playback.OK, self.replica.scored_prompt(ids, [score(server.weights, id) for id in ids]))
            return
        if path == self.replica.generate_path:
            self.answer(b"HTTP/1.1 400 Bad Request\r\n", {})
            return
        if self.struck(server, f"before {path}"):
            return
        try:
            answer = self.replica.call(method, path, body, self)
        except Refused as refused:
            server.refused.append(path)
            self.answer(b"HTTP/1.1 500 Internal Server Error\r\n", {"error": str(refused)})
            return
        if server.down is None and not self.struck(server, f"after {path}"):
            self.answer(playback.OK, answer)

    def struck(self, server: PlayedServer, moment: str) -> bool:
        """Crash as drawn. Return whether the call has no other answer."""
        crash = server.crashes(moment)
        if crash == "die":
            server.die(moment)
        elif crash == "refuse":
            self.answer(b"HTTP/1.1 500 Internal Server Error\r\n", {})
        return crash != "no"

    def answer(self, head: bytes, body: Any) -> None:
        text = json.dumps(body).encode()
        self.transport.write(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.replica.server._connections.discard(self)


class _VLLM(playback.VLLM):  # type: ignore[misc,name-defined]
    def __init__(self, server: PlayedServer, clock: Any) -> None:
        super().__init__(clock, 1)
        self.server = server

    def control(self, path: str, body: Any) -> Any:
        match path:
            case "/version":
                return {"version": "0.32.0"}
            case "/sleep?level=2&mode=abort":
                self.server.release(["weights", "kv_cache"])
            case "/sleep?level=1&mode=abort":
                kept = self.server.weights
                self.server.release(["weights", "kv_cache"])
                self.server.weights = kept
            case "/wake_up?tags=weights":
                self.server.resume(["weights"])
            case "/wake_up?tags=kv_cache":
                self.server.resume(["kv_cache"])
            case "/is_sleeping":
                return {"is_sleeping": bool(self.server.asleep)}
            case "/collective_rpc":
                self.server.update(body["kwargs"]["weights_path"])
            case "/start_weight_update":
                self.server.begin_update()
            case "/update_weights":
                given = body["update_info"]
                handle = pickle.loads(base64.b64decode(given["ipc_handles_pickled"]))[self.server.how.gpus[0]]
                described = (given["names"], given["dtype_names"], given["shapes"], given["tensor_sizes"])
                self.server.bucket(named_tensors(handle[DEVICE + 1], *described))
            case "/finish_weight_update":
                self.server.end_update()
                self.version = (body or {}).get("weight_version", self.version)
            case _:
                answer = super().control(path, body)
                if path.startswith("/server_info"):
                    answer["vllm_config"]["model_config"]["enable_sleep_mode"] = True
                    answer["vllm_config"]["instance_id"] = f"life {self.server.deaths}"
                return answer
        return None

    def scored_prompt(self, ids: list[int], scores: list[float]) -> Any:
        pairs = zip(ids[1:], scores[1:], strict=True)
        return {"prompt_logprobs": [None, *({str(id): {"logprob": score}} for id, score in pairs)]}


class _SGLang(playback.SGLang):  # type: ignore[misc,name-defined]
    def __init__(self, server: PlayedServer, clock: Any) -> None:
        super().__init__(clock, 1)
        self.server = server

    def control(self, path: str, body: Any) -> Any:
        match path:
            case "/release_memory_occupation":
                self.server.release(_tags(body))
            case "/health":  # it runs a request
                self.server.may_generate()
            case "/resume_memory_occupation":
                self.server.resume(_tags(body))
            case "/update_weights_from_disk":
                self.server.update(body["model_path"])
                return super().control(path, body)
            case "/begin_weight_update":
                self.server.begin_update()
            case "/update_weights_from_tensor":
                (entry,) = body["serialized_named_tensors"]
                given = SGLangUnpickler(io.BytesIO(base64.b64decode(entry))).load()
                _, handle = given["flattened_tensor"]
                fields = [described for _, described in given["metadata"]]
                names, shapes, kinds, _, _, sizes = zip(*fields, strict=True)
                dtypes = [str(kind).removeprefix("torch.") for kind in kinds]
                self.server.bucket(named_tensors(handle[DEVICE + 1], names, dtypes, shapes, sizes))
                self.version = body["weight_version"]
            case "/end_weight_update":
                self.server.end_update()
            case "/server_info":
                seconds = {"load_weight": 1.5 + self.server.deaths}
                own = {"version": "0.5.23", "enable_memory_saver": True, "startup_time": seconds}
                return super().control(path, body) | own
            case _:
                return super().control(path, body)
        return None

    def scored_prompt(self, ids: list[int], scores: list[float]) -> Any:
        found = [[None, ids[0], None], *([score, id, None] for id, score in zip(ids[1:], scores[1:], strict=True))]
        return {"meta_info": {"input_token_logprobs": found}}


class SGLangUnpickler(pickle.Unpickler):
    """Shows calls of SGLang's functions instead of making them."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("sglang."):
            return lambda *arguments: (name, arguments)
        return super().find_class(module, name)


def _tags(body: Any) -> list[str]:
    """CUDA graphs hold no memory of their own here."""
    return [tag for tag in body["tags"] if tag != "cuda_graph"]


_KINDS: dict[str, Any] = {"vllm": _VLLM, "sglang": _SGLang}
