"""Servers without a model: they play tokens back at a GPU's speed, over real HTTP, as vLLM's or SGLang's server does.

Every port is a replica. All streams of a process decode in step; when the machine is too slow for `--rate`, the steps
come later, and nothing is left out. The token and the log-probability at each place of a response follow from the
prompt (`token_at`, `logprob_at`), so a reader can check that no token is missing, repeated or wrong, across any number
of interruptions. A prompt is (any number, its own length, ...).

An abort answers like the real servers: the last event contains the tokens that were sampled and not sent yet.
`GET /played` returns the numbers of tokens that a replica has sampled and sent, and of its control calls.

    python benchmarks/playback.py --kind vllm --replicas 4

prints the ports as JSON and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

PERIOD = 1 << 15
"""Places after which tokens repeat."""
FIRST_ID = 100_000
VOCABULARY = FIRST_ID + PERIOD
SLOTS = 256
CONTEXT = 1 << 20
LAYERS, TOP_K, EXPERTS = 4, 2, 100
"""Shape of routes, which both servers return to requests that ask for them."""
OK = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\n"
STREAM = OK + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def place(first: int, position: int) -> int:
    return (first * 7919 + position) % PERIOD


def token_at(first: int, position: int) -> int:
    """The token at `position` of the response to a prompt that begins with `first`."""
    return FIRST_ID + place(first, position)


def logprob_at(first: int, position: int) -> float:
    """Its log-probability, a float32 as servers send it."""
    return float(struct.unpack("f", struct.pack("f", -((place(first, position) * 37 % 10007) + 1) / 3001))[0])


def routes_at(start: int, end: int, version: int) -> Any:
    """The routes of tokens `start` to `end`, [tokens, layers, top k]: of layers of which the first has no experts."""
    places = np.arange(start, end)[:, None, None] + 5 * np.arange(LAYERS)[:, None] + np.arange(TOP_K)
    return ((places + 3 * version) % EXPERTS * (np.arange(LAYERS) > 0)[:, None]).astype(np.uint8)


class Text:
    """The JSON of tokens in a row, as slices of one long text."""

    def __init__(self, form: Callable[[int, float], str]) -> None:
        once = [form(FIRST_ID + i, logprob_at(0, i)).encode() + b"," for i in range(PERIOD)]
        twice = once * 2
        self._text = b"".join(twice)
        self._at = [0]
        for one in twice:
            self._at.append(self._at[-1] + len(one))

    def __call__(self, start: int, count: int) -> bytes:
        return self._text[self._at[start] : self._at[start + count] - 1] if count else b""


class Stream:
    __slots__ = ("budget", "cached", "connection", "id", "interval", "prompt", "routes_from", "sent", "start", "where")

    def __init__(self, connection: Connection, id: str, ids: list[int], budget: int, interval: int, step: int) -> None:
        self.connection = connection
        self.id = id
        self.prompt = len(ids)
        self.routes_from: int | None = None
        self.where = place(ids[0], len(ids) - ids[1])
        self.budget = budget
        self.interval = interval
        self.start = step
        self.sent = 0

    def sampled(self, step: int) -> int:
        return min(step - self.start, self.budget)


class Replica:
    """One port: a server's calls, and the events of its streams."""

    def __init__(self, clock: Clock, stream_interval: int) -> None:
        self.clock = clock
        self.streams: dict[str, Stream] = {}
        self.sampled = self.sent = self.calls = 0
        self.version = "default"
        self.stream_interval = stream_interval

    def call(self, method: str, path: str, body: Any, connection: Connection) -> Any:
        """What a control call answers."""
        if path == "/played":
            running = sum(stream.sampled(self.clock.step) for stream in self.streams.values())
            sampled = self.sampled + running
            return {"sampled": sampled, "sent": self.sent, "running": len(self.streams), "calls": self.calls}
        self.calls += 1
        return self.control(path, body)

    def control(self, path: str, body: Any) -> Any:
        raise NotImplementedError

    def event(self, stream: Stream, count: int, reason: str | None) -> bytes:
        raise NotImplementedError

    def begin(self, connection: Connection, id: str, ids: list[int], budget: int, interval: int | None) -> None:
        stream = Stream(connection, id, ids, budget, max(interval or 1, self.stream_interval), self.clock.step)
        self.streams[id] = connection.stream = stream
        connection.transport.write(STREAM)
        self.clock.at(stream.start + 1, stream)

    def routes(self, stream: Stream) -> Any:
        """The routes of a stream that ends, of all tokens but the last one; None if it asked for none."""
        if stream.routes_from is None:
            return None
        end = stream.prompt + stream.sampled(self.clock.step) - 1
        return routes_at(stream.routes_from, end, int(self.version) if self.version.isdigit() else 0)

    def play(self, stream: Stream) -> None:
        """Send the due tokens of a stream."""
        step, connection = self.clock.step, stream.connection
        if connection.stream is not stream:
            return
        if connection.slow:
            self.clock.at(step + 1, stream)
            return
        sampled = stream.sampled(step)
        if sampled == stream.budget:
            self.end(stream, "length")
            return
        first = not stream.sent
        self.send(stream, sampled, None)
        # Streams begin together here, whereas streams of a long run are out of step.
        ahead = 1 + stream.where % stream.interval if first else stream.interval
        self.clock.at(min(step + ahead, stream.start + stream.budget), stream)

    def send(self, stream: Stream, sampled: int, reason: str | None) -> None:
        event = self.event(stream, sampled - stream.sent, reason)
        stream.sent = sampled
        stream.connection.transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def end(self, stream: Stream, reason: str) -> None:
        self.send(stream, stream.sampled(self.clock.step), reason)
        stream.connection.transport.write(DONE)
        stream.connection.stream = None
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self.sampled += stream.sampled(self.clock.step)
        self.sent += stream.sent

    def abort(self, ids: list[str]) -> None:
        for id in ids:
            if (stream := self.streams.get(id)) is not None:
                self.end(stream, "abort")


class VLLM(Replica):
    generate_path = "/inference/v1/generate"
    ids = Text(lambda token, _: str(token))
    scored = Text(
        lambda token, p: (
            f'{{"token_id":{token},"logprob":{p!r},"rank":3,'
            f'"top_logprobs":[{{"token_id":{token},"logprob":{p!r},"rank":3}}]}}'
        )
    )

    def generate(self, connection: Connection, body: Any) -> None:
        sampling = body["sampling_params"]
        id = f"generate-tokens-{body['request_id']}"
        self.begin(connection, id, body["token_ids"], sampling["max_tokens"], sampling.get("stream_interval"))
        self.streams[id].routes_from = sampling.get("routed_experts_prompt_start")

    def event(self, stream: Stream, count: int, reason: str | None) -> bytes:
        start = (stream.where + stream.sent) % PERIOD
        spans = routes = b"null"
        if reason is not None:
            if (rows := self.routes(stream)) is not None:
                file = io.BytesIO()
                np.save(file, rows)
                routes = b'"%b"' % base64.b64encode(file.getvalue())
            total = stream.sent + count
            spans = msgspec.json.encode([{"version": self.version, "start": 0, "end": total}] if total else [])
        return (
            b'data: {"request_id":"%b","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":%b,'
            b'"stop_reason":null,"token_ids":[%b],"routed_experts":%b,"sampling_mask":null,"weight_versions":%b,'
            b'"logprobs":{"content":[%b]}}]}\n\n'
            % (
                stream.id.encode(),
                msgspec.json.encode(reason),
                self.ids(start, count),
                routes,
                spans,
                self.scored(start, count),
            )
        )

    def control(self, path: str, body: Any) -> Any:
        match path:
            case "/v1/models":
                return {"data": [{"id": "played", "root": "/nowhere", "max_model_len": CONTEXT}]}
            case "/server_info?config_format=json":
                config = {
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                    "parallel_config": {"worker_extension_cls": ""},
                    "device_config": {"device": "cuda"},
                    "aux_output_config": {"enable_return_routed_experts": True},
                    "scheduler_config": {"max_num_seqs": SLOTS, "stream_interval": self.stream_interval},
                    "cache_config": {"kv_cache_size_tokens": SLOTS * CONTEXT},
                }
                return {"vllm_config": config}
            case "/get_world_size":
                return {"world_size": 1}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/inference/v1/abort_requests":
                self.abort(body["request_ids"])
        return None


class SGLang(Replica):
    generate_path = "/generate"
    ids = Text(lambda token, _: str(token))
    scored = Text(lambda token, p: f"[{p!r},{token},null]")

    def generate(self, connection: Connection, body: Any) -> None:
        sampling = body["sampling_params"]
        interval = sampling.get("stream_interval") or self.stream_interval
        self.begin(connection, body["rid"], body["input_ids"], sampling["max_new_tokens"], interval)
        if body.get("return_routed_experts"):
            self.streams[body["rid"]].routes_from = body["routed_experts_start_len"]

    def event(self, stream: Stream, count: int, reason: str | None) -> bytes:
        start, total = (stream.where + stream.sent) % PERIOD, stream.sent + count
        spans = b""
        if reason is not None:
            account = [{"version": self.version, "start": 0, "end": total}] if total else []
            spans = b',"weight_versions":%b,"e2e_latency":1.25' % msgspec.json.encode(account)
            if (rows := self.routes(stream)) is not None:
                spans += b',"routed_experts":"%b"' % base64.b64encode(rows.astype("<i4").tobytes())
        return (
            b'data: {"output_ids":[%b],"meta_info":{"id":"%b","finish_reason":%b,"prompt_tokens":%d,'
            b'"weight_version":"%b","num_retractions":0,"output_token_logprobs":[%b],"output_token_logprobs_length":%d,'
            b'"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":0,"dp_rank":null%b}}\n\n'
            % (
                self.ids(start, count),
                stream.id.encode(),
                b"null" if reason is None else b'{"type":"%b"}' % reason.encode(),
                stream.prompt,
                self.version.encode(),
                self.scored(start, count),
                total,
                total,
                spans,
            )
        )

    def control(self, path: str, body: Any) -> Any:
        match path:
            case "/model_info":
                return {"model_path": "/nowhere", "weight_version": self.version}
            case "/server_info":
                state = {"effective_max_running_requests_per_dp": SLOTS}
                sizes = {"max_req_input_len": CONTEXT, "max_total_num_tokens": SLOTS * CONTEXT}
                flags = {"incremental_streaming_output": True, "enable_return_routed_experts": True}
                return {"internal_states": [state], "tp_size": 1, **flags, **sizes}
            case "/update_weights_from_disk":
                self.version = body["weight_version"]
            case "/abort_request":
                self.abort(list(self.streams) if body.get("abort_all") else [body["rid"]])
        return None


KINDS: dict[str, type[Replica]] = {"vllm": VLLM, "sglang": SGLang}


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.buffer = b""
        self.stream: Stream | None = None
        self.slow = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.stream is not None:
            stream, self.stream = self.stream, None
            self.replica.forget(stream)

    def pause_writing(self) -> None:
        self.slow = True

    def resume_writing(self) -> None:
        self.slow = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            request, *lines = self.buffer[:end].split(b"\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            size = int(headers.get(b"content-length", 0))
            if len(self.buffer) < end + 4 + size:
                return
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            method, path, _ = request.decode().split(" ")
            self.request(method, path, msgspec.json.decode(body) if body else None)

    def request(self, method: str, path: str, body: Any) -> None:
        if path == self.replica.generate_path:
            if body.get("sampling_params"):
                self.replica.generate(self, body)
            else:
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            return
        answer = msgspec.json.encode(self.replica.call(method, path, body, self))
        head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
        self.transport.write(OK + head + answer)


class Clock:
    """The decode steps of a process's replicas."""

    def __init__(self, rate: float) -> None:
        self.step = 0
        self._rate = rate
        self._due: dict[int, list[Stream]] = {}

    def at(self, step: int, stream: Stream) -> None:
        self._due.setdefault(step, []).append(stream)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / self._rate, loop.time())
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.step += 1
            for stream in self._due.pop(self.step, ()):
                stream.connection.replica.play(stream)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="vllm")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rate", type=float, default=60.0, help="tokens/s of each stream")
    parser.add_argument("--stream-interval", type=int, default=1, help="the server's own")
    args = parser.parse_args()
    clock, loop = Clock(args.rate), asyncio.get_running_loop()
    ports = []
    for _ in range(args.replicas):
        replica = KINDS[args.kind](clock, args.stream_interval)
        server = await loop.create_server(lambda replica=replica: Connection(replica), "127.0.0.1", 0, backlog=1024)
        ports.append(server.sockets[0].getsockname()[1])
    playing = asyncio.create_task(clock.run())
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    playing.cancel()


if __name__ == "__main__":
    asyncio.run(main())
