"""An actor on a node that keeps a vLLM or SGLang server running there as a process of its own.

Invariants:
- the server ends with its actor, however that ends;
- `ping` is answered while the server starts, as long as the actor's process and its node run;
- each `open` ends with a server that answers, or raises: a server that has died or hangs is restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import aiohttp
import ray

from april.engines.allocator_settings import without_expandable_segments
from april.engines.gpus import Gpu, chosen, installed, variables_for
from april.engines.servers.launch import Launch, Server, launch_sglang, launch_vllm
from april.rollout.engine import KVPolicy

ANSWERING = 10.0
"""Seconds that a server may take to answer a health check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """A server to start on a node. Paths refer to the node's file system.

    Args:
        arguments: options of the server.
        max_num_seqs, context_length: expected capacity, until the server has reported its own.
        on_update: as of `ServerEngine`.
        log_dir: the log is `log_dir/NAME.log`; in the run's directory, if the nodes share that.
        api_key: required of clients.
        broadcast: weights are sent over a process group (vLLM).
        ipc: weights are read from the trainer's memory (vLLM).
        gpus: GPUs that the server shares with ranks, by their names in the node's visibility variables; empty: those
            that Ray assigns to the actor.
        shares_devices: whether it has to release its memory for the trainer.
    """

    kind: Literal["vllm", "sglang"]
    model: str
    python: str
    arguments: Sequence[str]
    log_dir: Path
    api_key: str | None
    max_num_seqs: int
    context_length: int | None
    on_update: KVPolicy
    ready_timeout: float = 900.0
    broadcast: bool = False
    ipc: bool = False
    gpus: tuple[str, ...] = ()
    shares_devices: bool = False


class RunningServer(NamedTuple):
    """A server that is ready.

    Args:
        url: its address.
        gpus: UUIDs of the GPUs that it shares with ranks, as the driver reports them; empty if unknown.
    """

    url: str
    gpus: tuple[str, ...]


class ServerActor:
    """Runs the server that `settings` describe, under a name."""

    def __init__(self, settings: ServerSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._life = 0
        self._changing = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._server: Server | None = None

    async def ping(self) -> int:
        """Return the life that it is in."""
        return self._life

    async def open(self, life: int) -> RunningServer:
        """Begin a life, and return the server, which is ready."""
        async with self._changing:
            self._life = max(life, self._life)
            if self._server is not None and not await self._answers(self._server):
                self._server = None
                await self._stack.aclose()
            if self._server is None:
                self._server = await self._start()
            return RunningServer(self._server.url, self._server.how.gpus)

    async def kill(self) -> None:
        """Kill the server; the next `open` starts another one."""
        if self._server is not None:
            await self._server.kill()

    async def _start(self) -> Server:
        own = self._settings
        shared = self._shared()
        how = Launch(
            log_dir=own.log_dir,
            name=self._name,
            python=own.python,
            arguments=own.arguments,
            environment={
                **(variables_for(shared, any(gpu.rocm for gpu in shared)) if shared else {}),
                **(without_expandable_segments() if own.shares_devices else {}),
            },
            gpus=tuple(gpu.uuid for gpu in shared if gpu.uuid),
            host=ray.util.get_node_ip_address(),
            api_key=own.api_key,
            ready_timeout=own.ready_timeout,
            # The pool restarts the server by `open`, after its own back-off.
            restarts=0,
        )
        vllm = launch_vllm(own.model, how, broadcast=own.broadcast, ipc=own.ipc) if own.kind == "vllm" else None
        return await self._stack.enter_async_context(vllm or launch_sglang(own.model, how))

    def _shared(self) -> list[Gpu]:
        """Return the GPUs that the server shares with ranks."""
        names = self._settings.gpus
        if not names:
            return []
        # A node whose driver lists no GPUs still knows their names.
        return chosen(installed(), {"CUDA_VISIBLE_DEVICES": ",".join(names)}) or [Gpu(name) for name in names]

    async def _answers(self, server: Server) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            limit = aiohttp.ClientTimeout(total=ANSWERING)
            async with aiohttp.ClientSession(timeout=limit) as session, session.get(f"{server.url}/health") as response:
                return server.down is None and response.status == 200
        return False
