"""A wait for a server's answer while the event loop is blocked for longer than the limit of the wait."""

from __future__ import annotations

import asyncio
import time

from april.engines.servers.vllm import connect_vllm
from tests.engines.servers.test_stream_reader import playback, playing
from tests.limits import HANG, NEVER


async def test_a_health_check_while_the_loop_is_blocked_loses_no_server() -> None:
    loop, blocked = asyncio.get_running_loop(), 0.0
    async with playing("vllm") as (url,):
        engine = await connect_vllm(url, vocab_size=playback.VOCABULARY, patience=NEVER)
        loop.time = lambda: time.monotonic() + blocked  # type: ignore[method-assign]
        checking = asyncio.create_task(engine.check())
        await asyncio.sleep(0)  # it waits now
        blocked = 2 * NEVER
        await asyncio.wait_for(checking, HANG)
        await engine.close()
