"""A reward that comes with trouble: servers lose their weights whenever they sleep, and one is killed the second time.

Without a GPU nothing is lost by itself; the servers' own checkers reset the weights. The file named by STRUCK records
that a server was killed, so that no later process kills another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from april.engines.member import ReplicaState
from april.engines.pool import EnginePool
from tests.processes import processes
from tests.ranks.rewards import even_characters as even_characters
from tests.servers.shared_script import RESETS

_sleep = EnginePool.sleep
_turns = 0


async def _lose_weights(engine: Any) -> None:
    reset = RESETS[engine._api.kind.lower()]
    async with (
        aiohttp.ClientSession(engine.url, headers=engine._http._headers) as session,
        session.post(reset[0], json=reset[1]) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def _strike(pool: EnginePool) -> None:
    global _turns
    await _sleep(pool)
    members: list[Any] = [m for m in pool.members if m.state in (ReplicaState.READY, ReplicaState.STALE)]
    asleep = [member.replica.engine for member in members]
    await asyncio.gather(*map(_lose_weights, asleep))
    _turns += 1
    struck = Path(os.environ["STRUCK"])
    if _turns == 2 and not struck.exists():
        port = asleep[-1].url.rpartition(":")[2]
        server = min(pid for pid, (_, command) in processes().items() if f"--port {port}" in command)
        os.killpg(os.getpgid(server), signal.SIGKILL)
        struck.write_text("while it slept")


EnginePool.sleep = _strike  # type: ignore[method-assign]
