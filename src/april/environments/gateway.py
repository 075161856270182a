"""A program that talks to an OpenAI API, as an environment: its requests are observations, its answers are turns.

    [environment]
    path = "april.environments.gateway:Program"
    params = { command = ["python", "my_agent.py"] }
    recovery = "restart"

The program finds the address in `OPENAI_BASE_URL`, as OpenAI's clients do, and the problem as one line of JSON on its
standard input. The last line that it writes may be `{"reward": 1.0}`.

Invariants:
- an episode is one program, and a session of its own: it has a server to itself;
- tokens are never rendered again: a request must hold all messages so far, word for word, and only those behind them
  are new. A program that rewrites its history has failed, and the message that differs is named;
- a request waits as long as the policy takes, over training too; the program ends with its episode.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import parent_process
from queue import Queue
from secrets import token_hex
from typing import Any, NamedTuple

from april.rollout.episodes.environment import EnvStep, Message, Observation, ObservationError, Turn
from april.secrets import without_secrets


class Asked(NamedTuple):
    """A request, and where its answer goes."""

    body: Mapping[str, Any]
    answer: Queue[str | None]


class Ended(NamedTuple):
    """The program's end."""

    code: int


class Program:
    """One run of a program.

    Args:
        command: the program and its arguments; `python` is april's own interpreter.
        rewarded: whether its last line must be its reward. False: the task rewards the response.
        env: environment variables that it gets; beside them it sees none that looks like a secret.
    """

    def __init__(self, command: Sequence[str], rewarded: bool = True, env: Mapping[str, str] | None = None) -> None:
        if isinstance(command, str) or not command:
            raise ValueError('command: give a list of words, like ["python", "my_agent.py"]')
        self._command = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        self._rewarded = rewarded
        self._env = dict(env or {})
        self._happened: Queue[Asked | Ended] = Queue()
        self._history: list[Message] = []
        self._waiting: Asked | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._server: ThreadingHTTPServer | None = None

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        self.close()
        self._happened = Queue()
        asked = prompt["prompt"]
        self._history = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        key = token_hex(16)
        self._server = _server(self._happened, key)
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        address = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            env={**_environment(), **self._env, "OPENAI_BASE_URL": address, "OPENAI_API_KEY": key},
        )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps({**prompt, "seed": seed}).encode() + b"\n")
        threading.Thread(target=_wait, args=(self.process, self._happened), daemon=True).start()
        happened = self._happened.get()
        if isinstance(happened, Ended):
            raise ObservationError(f"the program ended before it asked anything: {self._last_words(happened.code)}")
        return self._new(happened)

    def step(self, turn: Turn) -> EnvStep:
        assert self._waiting is not None, "the program has asked nothing"
        self._history.append({"role": "assistant", "content": turn.text})
        waiting, self._waiting = self._waiting, None
        waiting.answer.put(turn.text)
        happened = self._happened.get()
        if isinstance(happened, Asked):
            return EnvStep(self._new(happened))
        if happened.code != 0:
            raise ObservationError(f"the program failed: {self._last_words(happened.code)}")
        return EnvStep(reward=self._reward(), done=True)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._output.close()
            self._errors.close()
            self.process = None
        if self._waiting is not None:
            self._waiting.answer.put(None)
            self._waiting = None
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _new(self, asked: Asked) -> list[Message]:
        """The messages of a request that come behind all others."""
        self._waiting = asked
        messages, known = asked.body.get("messages"), self._history
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ObservationError("the program's request has no list of messages")
        if asked.body.get("tools") or asked.body.get("stream"):
            raise ObservationError("the program asks for tools or for a stream, which the gateway does not have")
        for index, message in enumerate(known):
            now = messages[index] if index < len(messages) else None
            if now is None or (now["role"], now.get("content")) != (message["role"], message["content"]):
                raise ObservationError(
                    f"message {index} of the program's request is not what it was: {_short(now)} for {_short(message)}"
                )
        new: list[Message] = messages[len(known) :]
        self._history = [*known, *new]
        return new

    def _reward(self) -> float:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        try:
            reward = float(json.loads(last)["reward"])
        except (ValueError, TypeError, KeyError):
            reward = math.nan
        if not self._rewarded:
            return 0.0
        if not math.isfinite(reward):
            raise ObservationError(
                f'the program\'s last line is {last[:60]!r}: it must be {{"reward": NUMBER}}, or set rewarded = false'
            )
        return reward

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().split("\n")
        return f"exit code {code}, {lines[-1][:200]}"


def _environment() -> dict[str, str]:
    """This process's, without secrets; a worker's has none but those that it may see."""
    return dict(os.environ) if parent_process() is not None else without_secrets(os.environ)


def _wait(process: subprocess.Popen[bytes], happened: Queue[Asked | Ended]) -> None:
    happened.put(Ended(process.wait()))


def _short(message: Any) -> str:
    text = json.dumps(message, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _server(happened: Queue[Asked | Ended], key: str) -> ThreadingHTTPServer:
    """A server on the loopback interface that puts requests with the key into `happened`, and answers when it is told
    what."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
                self._send(401, {"error": {"message": "the gateway wants the key in OPENAI_API_KEY"}})
                return
            if not self.path.endswith("/chat/completions"):
                self._send(404, {"error": {"message": f"the gateway has /v1/chat/completions, not {self.path}"}})
                return
            try:
                asked = json.loads(body)
            except ValueError:
                self._send(400, {"error": {"message": "the request is no JSON"}})
                return
            answer: Queue[str | None] = Queue()
            happened.put(Asked(asked if isinstance(asked, dict) else {}, answer))
            text = answer.get()
            if text is None:
                self._send(410, {"error": {"message": "the episode is over"}})
            else:
                self._send(200, _completion(asked, text))

        def _send(self, status: int, content: Mapping[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def _completion(asked: Mapping[str, Any], text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-april",
        "object": "chat.completion",
        "created": 0,
        "model": asked.get("model", "policy"),
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
