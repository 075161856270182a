"""Servers: bytes freed by sleep, log-probabilities against the trainer's, and a server killed in mid-update."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from gpu_parts.exactness import BFLOAT16_ERROR, FLOAT32_ERROR, logprob_error
from gpu_parts.train import prepared
from node_parts.given import Given, finish, samples
from parts import Figures
from transformers import AutoModelForCausalLM

from april.engines.pool import EnginePool
from april.engines.servers.broadcast import Broadcast
from april.engines.servers.client import HTTPClient
from april.rollout.engine import EngineError

SLEEP_SECONDS = 60.0
RECOVERY_SECONDS = 120.0


def slept(given: Given) -> Figures:
    """One server: sleep at the deepest level, wake, update, log-probabilities before and after."""
    yield from ran(_slept(given))


def killed(given: Given) -> Figures:
    """Two servers that take weights by a broadcast, one of which is killed after the first bucket."""
    yield from ran(_killed(given))


def ran(figures: AsyncIterator[tuple[str, Any]]) -> Figures:
    """The figures of an asynchronous part, as they come."""
    with asyncio.Runner() as runner:
        while True:
            try:
                yield runner.run(anext(figures))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return


async def _slept(given: Given) -> AsyncIterator[tuple[str, Any]]:
    kind, devices = given.kind, given.map(1)
    on_gpu = given.device != "cpu"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepared(given.bench, folder)
        began = time.perf_counter()
        more = [kind.sleeps] if on_gpu else []  # the servers' builds for CPUs refuse it
        server = await stack.enter_async_context(given.server(folder / "model", folder, 0, more, devices))
        yield "start_seconds", time.perf_counter() - began
        engine = await kind.connect(server.url, process=server)
        stack.push_async_callback(engine.close)
        model, gaps = policy(folder / "model", given), {}
        await finish(engine, before := samples(given))
        gaps["before"] = logprob_error(model, before)
        yield "logprob_gap", gaps
        client = HTTPClient(server.url, SLEEP_SECONDS * given.slower)
        stack.push_async_callback(client.close)
        free = free_bytes(given)
        began = time.perf_counter()
        await client.post(*kind.sleep)
        yield "sleep_seconds", time.perf_counter() - began
        freed = free_bytes(given) - free
        yield "freed_bytes", freed if on_gpu else None
        change(model)
        model.save_pretrained(folder / "changed")
        began = time.perf_counter()
        await client.post(*kind.wake_weights)
        yield "wake_weights_seconds", time.perf_counter() - began
        began = time.perf_counter()
        await engine.update_weights(1, folder / "changed")
        yield "update_seconds", time.perf_counter() - began
        await client.post(*kind.wake_cache)
        await finish(engine, after := samples(given))
        gaps["after"] = logprob_error(model, after)
        yield "logprob_gap", gaps
        held = sum(parameter.nbytes for parameter in model.parameters())
        wrong = [f"sleep freed {freed} bytes, less than the weights' {held}"] if on_gpu and freed < held else []
        yield "failures", wrong + apart(given, gaps)


async def _killed(given: Given) -> AsyncIterator[tuple[str, Any]]:
    devices = given.map(2)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepared(given.bench, folder)
        starting = [
            stack.enter_async_context(given.server(folder / "model", folder, i, devices=devices, broadcast=True))
            for i in range(2)
        ]
        servers = await asyncio.gather(*starting)
        pool = EnginePool([await given.kind.connect(server.url, process=server) for server in servers])
        stack.push_async_callback(pool.close)
        model, kills = policy(folder / "model", given), [servers[1]]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for number, named in enumerate(model.named_parameters()):
                if number == 5 and kills:
                    os.killpg(kills.pop().process.pid, signal.SIGKILL)
                yield named[0], named[1].detach()

        backend: Any = "nccl" if given.device != "cpu" else "gloo"
        bucket = given.bench.size(1 << 26, 1 << 12)
        broadcast = Broadcast(tensors, backend, timeout=30 * given.slower, bucket_bytes=bucket)
        change(model)
        began = time.perf_counter()
        try:
            await pool.update_weights(1, broadcast.offer(1))
            outcome = "the other server was updated"
        except EngineError as error:
            outcome = f"refused: {error}"
        yield "killed", not kills
        yield "outcome", outcome
        yield "seconds", time.perf_counter() - began
        while pool.version < 1 and time.perf_counter() - began < RECOVERY_SECONDS * given.slower:
            try:
                await pool.update_weights(1, broadcast.offer(1))
            except EngineError:
                await asyncio.sleep(1)
        yield "updated_after_seconds", time.perf_counter() - began if pool.version == 1 else None
        await finish(pool, done := samples(given, 16))
        gaps = {"after the kill": logprob_error(model, done)}
        yield "logprob_gap", gaps
        wrong = [] if pool.version == 1 else [f"no update in {RECOVERY_SECONDS:g} s"]
        wrong += [] if not kills else ["no server was killed: the policy has too few tensors"]
        yield "failures", wrong + apart(given, gaps)


def policy(path: Path, given: Given) -> Any:
    """The trainer's copy."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=given.bench.dtype).to(given.device).eval()


@torch.no_grad()
def change(model: Any) -> None:
    """Give the policy other weights, as training does."""
    for parameter in model.parameters():
        parameter.mul_(1.05)


def free_bytes(given: Given) -> int:
    """Free bytes of the first server's GPU; 0 on the CPU."""
    devices = given.map(1)
    return devices.engines[0][0].free if devices else 0


def apart(given: Given, gaps: dict[str, float]) -> list[str]:
    most = FLOAT32_ERROR if given.bench.dtype == torch.float32 else BFLOAT16_ERROR
    return [f"log-probabilities {when}: {gap:.2g} nats apart" for when, gap in gaps.items() if not gap <= most]
