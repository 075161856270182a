"""A policy whose turns are written in advance, with a real tokenizer and a real chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from april.gateway.access import Access
from april.gateway.server import Gateway, GatewayParams
from april.images.kept import KeptImages
from april.rendering.choice import program_renderer
from april.rollout.episodes.turns import BadTurn, EpisodeOver, TurnReply, TurnRequest
from april.rollout.stop_strings import stop_of
from tests.limits import HANG
from tests.rendering.tokenizers import tokenizer

CUT = "…"
"""Ends a script's turn that a limit cut."""
CLIENTS: list[Any] = []
"""Clients to close at the end of a test."""


class ScriptedPolicy:
    """Answers the requests of each episode with the next of its turns.

    Args:
        script: texts of the turns, in their order; or a function of the request that returns one.
        template: chat template of the tokenizer.
    """

    def __init__(self, script: Sequence[str] | Callable[[TurnRequest], str], template: str = "qwen3") -> None:
        self.script = script
        self.tokenizer = tokenizer(template)
        self.renderer = program_renderer(self.tokenizer, [self.tokenizer.eos_token_id])
        self.requests: list[TurnRequest] = []
        self.histories: dict[str, list[Any]] = {}
        self.aliases: dict[str, str] = {}
        self.lost: list[str] = []
        self.cancelled = 0
        self.over: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()
        """Cleared while the policy is trained."""

    async def reply(self, episode_key: str, request: TurnRequest) -> Sequence[TurnReply]:
        if episode_key in self.over:
            raise EpisodeOver("The episode has ended.")
        self.requests.append(request)
        messages = [*request.messages]
        if request.parent is not None:
            parent = self.aliases.get(request.parent, request.parent)
            if parent not in self.histories:
                raise BadTurn("Previous response not found.", "previous_response_not_found")
            messages = [*self.histories[parent], *messages]
        prompt = self.renderer.render(messages, request.tools)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [self._turn(request, messages, prompt) for _ in range(request.n)]

    def _turn(self, request: TurnRequest, messages: list[Any], prompt: Sequence[int]) -> TurnReply:
        node = str(len(self.histories))
        text = self.script(request) if callable(self.script) else self.script[len(self.histories)]
        cut = text.endswith(CUT)
        ids = self.tokenizer(text.removesuffix(CUT), add_special_tokens=False).input_ids
        stop = stop_of(self.renderer.decode, ids, request.stop, ())
        if stop is not None:
            cut = False
            ids = next(
                ids[:count]
                for count in range(1, len(ids) + 1)
                if stop_of(self.renderer.decode, ids[:count], request.stop, ()) is not None
            )
        elif not cut:
            ids = [*ids, self.tokenizer.eos_token_id]
        message = self.renderer.parse(ids, request.tools, node, stop)
        self.histories[node] = [*messages, message]
        if request.alias is not None:
            self.aliases[request.alias] = node
        end, string = "length" if cut else "stop", None if stop is None else stop.string
        return TurnReply(node, message, prompt, ids, [-0.5] * len(ids), end, stop=string)

    def undelivered(self, episode_key: str, node_ids: Sequence[str]) -> None:
        self.lost += node_ids

    @property
    def last(self) -> TurnRequest:
        return self.requests[-1]


def call(name: str, arguments: str) -> str:
    """Return a call as Qwen3 writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def served(policy: ScriptedPolicy, images: KeptImages | None = None, **settings: Any):
    """A gateway for the policy, and the access of one episode."""
    gateway = Gateway(policy, policy.renderer, policy.renderer, GatewayParams(**settings), b"secret of the run", images)
    async with gateway:
        access: Access = gateway.access("0.0")
        try:
            yield gateway, access
        finally:
            while CLIENTS:
                await CLIENTS.pop().close()


async def until(condition: Callable[[], Any], *running: asyncio.Task[Any]) -> None:
    """Poll `condition` until it holds.

    Args:
        running: tasks that must not end before; the error of one that does is raised.
    """
    async with asyncio.timeout(HANG):
        while not condition():
            for task in running:
                assert not task.done(), f"ended early: {task if task.cancelled() else task.result()}"
            await asyncio.sleep(0.01)
