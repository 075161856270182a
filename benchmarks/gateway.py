"""Processor time that the gateway adds to a request, and requests that wait at the same time.

The policy answers at once with a fixed turn, so that only the gateway's work is left: HTTP, JSON, the API's types. In
the second part each conversation is looked for in a tree, and the turn is read back from its tokens, as in a run, but
without an engine. The client is another process. Reported per API and history: processor seconds of the gateway's
process for a request, medians over rounds; and for open requests: memory of the gateway for each, and the seconds to
answer all of them.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from record import save, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

from april.gateway.server import Gateway, GatewayParams
from april.rendering.template_reader import TemplateReader
from april.rollout.episodes.conversation_tree import ConversationTree
from april.rollout.episodes.turns import TurnReply, TurnRequest
from tests.rendering.tokenizers import tokenizer

WORDS = "The quick brown fox jumps over the lazy dog and runs away from there, since nobody wants it to stay. "
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


class FixedPolicy:
    """Answers at once, or when `open` is set.

    Args:
        tree: look for each request's conversation in a tree, and read the turn back, as a run does.
    """

    def __init__(self, tree: bool) -> None:
        tokens = tokenizer("qwen3")
        self.renderer = TemplateReader(tokens, [tokens.eos_token_id])
        self.turn = [*tokens(WORDS, add_special_tokens=False).input_ids, tokens.eos_token_id]
        self.message = self.renderer.parse(self.turn)
        self.tree = tree
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self._trees: dict[str, ConversationTree] = {}

    async def reply(self, episode_key: str, request: TurnRequest) -> Sequence[TurnReply]:
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1
        if self.tree:
            return [self._of_tree(self._trees.setdefault(episode_key, ConversationTree()), request)]
        return [TurnReply("0.0/0", self.message, range(100), self.turn, [-0.5] * len(self.turn), "stop")]

    def _of_tree(self, tree: ConversationTree, request: TurnRequest) -> TurnReply:
        match = tree.find(request)
        if match.after is not None:
            self.renderer.extend([0] * 10_000, self.turn, match.messages, match.tools)
        node = tree.add(f"0.0/{len(tree)}", match)
        message = self.renderer.parse(self.turn, request.tools, node.id)
        tree.said(node, message)
        return TurnReply(node.id, message, range(100), self.turn, [-0.5] * len(self.turn), "stop")

    def undelivered(self, episode_key: str, node_ids: Sequence[str]) -> None:
        pass


def body(api: str, turns: int) -> dict[str, Any]:
    """Return a request whose history has `turns` turns of the policy."""
    history: list[dict[str, Any]] = []
    for turn in range(turns):
        history += [{"role": "user", "content": f"{turn} {WORDS}"}, {"role": "assistant", "content": WORDS}]
    history.append({"role": "user", "content": "Go on."})
    if api == "responses":
        tool = {"type": "function", **TOOL["function"]}
        return {"model": "policy", "instructions": WORDS, "input": history, "tools": [tool]}
    if api == "messages":
        own = {key: value for key, value in TOOL["function"].items() if key != "parameters"}
        tool = {**own, "input_schema": TOOL["function"]["parameters"]}
        return {"model": "policy", "system": WORDS, "max_tokens": 99, "messages": history, "tools": [tool]}
    return {"model": "policy", "messages": [{"role": "system", "content": WORDS}, *history], "tools": [TOOL]}


def client(connection: Any, address: str, secrets: Sequence[str]) -> None:
    """Send requests by orders of the other process: a path, a body, a number, and whether all are sent at once."""
    asyncio.run(_client(connection, address, secrets))


async def _client(connection: Any, address: str, secrets: Sequence[str]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def send(path: str, data: bytes, secret: str) -> None:
            headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
            async with http.post(address + path, data=data, headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:300]

        while (asked := await asyncio.to_thread(connection.recv)) is not None:
            path, data, count, at_once = asked
            if at_once:
                await asyncio.gather(*(send(path, data, secrets[n % len(secrets)]) for n in range(count)))
            else:
                for _ in range(count):
                    await send(path, data, secrets[0])
            connection.send(None)


async def measure(rounds: int, requests: int, opened: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"overhead": [], "open requests": []}
    for tree in (False, True):
        policy = FixedPolicy(tree)
        gateway = Gateway(policy, policy.renderer, policy.renderer, GatewayParams(keep_alive=5.0))
        async with gateway:
            access = [gateway.access(f"{index}.0") for index in range(64)]
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=client, args=(theirs, access[0].address, [one.secret for one in access]), daemon=True
            )
            process.start()

            async def ask(path: str, data: bytes, count: int, at_once: bool = False, ours: Any = ours) -> None:
                ours.send((path, data, count, at_once))
                await asyncio.to_thread(ours.recv)

            for api in PATHS:
                for turns in (0, 100):
                    for stream in (False, True):
                        data = json.dumps({**body(api, turns), "stream": stream}).encode()
                        policy._trees.clear()
                        await ask(PATHS[api], data, 20)
                        seconds = []
                        for _ in range(rounds):
                            before = time.process_time()
                            await ask(PATHS[api], data, requests)
                            seconds.append((time.process_time() - before) / requests)
                        found["overhead"].append(
                            {
                                "api": api,
                                "turns of history": turns,
                                "stream": stream,
                                "with tree and reading": tree,
                                "bytes": len(data),
                                "processor milliseconds a request": spread([1000 * s for s in seconds]),
                            }
                        )
                        print(found["overhead"][-1])
            if not tree:
                for count in opened:
                    found["open requests"].append(await _open(policy, ask, count))
                    print(found["open requests"][-1])
            ours.send(None)
            await asyncio.to_thread(process.join)
    return found


async def _open(policy: FixedPolicy, ask: Any, count: int) -> dict[str, Any]:
    policy.open.clear()
    before = _memory()
    asked = asyncio.create_task(ask(PATHS["chat"], json.dumps(body("chat", 10)).encode(), count, True))
    began = time.perf_counter()
    while policy.waiting < count:
        await asyncio.sleep(0.05)
    arrived, held = time.perf_counter() - began, _memory() - before
    began = time.perf_counter()
    policy.open.set()
    await asked
    return {
        "requests": count,
        "seconds until all wait": round(arrived, 3),
        "kilobytes each": round(held / count / 1024, 1),
        "seconds to answer all": round(time.perf_counter() - began, 3),
    }


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--open", type=int, nargs="*", default=[1000, 4000])
    own = parser.parse_args()
    save(__file__, asyncio.run(measure(own.rounds, own.requests, own.open)))


if __name__ == "__main__":
    main()
