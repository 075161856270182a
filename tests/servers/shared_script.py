"""A run on shared devices whose servers lose their weights when they sleep, and that is disturbed at given calls.

    python -m tests.servers.shared_script RECIPE new|resume '[[call, number, moment, victim], …]'

`call` is a method of the pool, `number` counts its calls from 1, `moment` is "before" or "after" the call, and `victim`
is killed then: "server" or "april". Without a GPU nothing is lost by itself; the servers' own checkers reset the
weights. With `RANK` other than 0 in its environment, the process is a rank that follows rank 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from april.config.reading import load_recipe
from april.engines.pool import EnginePool
from april.training.build import train
from april.training.distributed import run_follower
from april.training.rank_protocol import is_rank_zero

RESETS = {
    "vllm": ("/weight_checker", {"action": "reset"}),
    "sglang": ("/weights_checker", {"action": "reset_tensors"}),
}


async def lose_weights(kind: str, url: str) -> None:
    """Reset the weights of a server, as sleeping does on GPUs."""
    path, body = RESETS[kind]
    async with aiohttp.ClientSession(url) as session, session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()


class Disturbed:
    """Wraps the pool's calls."""

    def __init__(self, kind: str, plan: list[list[Any]]) -> None:
        self._kind, self._plan = kind, {tuple(entry) for entry in plan}
        self._calls: Counter[str] = Counter()

    def wrap(self, call: str) -> None:
        original = getattr(EnginePool, call)

        async def wrapped(pool: Any, *args: Any) -> None:
            self._calls[call] += 1
            await self._strike(pool, call, "before")
            await original(pool, *args)
            if call == "sleep":
                servers = [member.replica for member in pool.members if member.state.value in ("ready", "stale")]
                await asyncio.gather(*(lose_weights(self._kind, server.url) for server in servers))
            await self._strike(pool, call, "after")

        setattr(EnginePool, call, wrapped)

    async def _strike(self, pool: Any, call: str, moment: str) -> None:
        for victim in ("server", "april"):
            if (call, self._calls[call], moment, victim) not in self._plan:
                continue
            print(f"{victim} killed {moment} {call} {self._calls[call]}", flush=True)
            if victim == "april":
                os.kill(os.getpid(), signal.SIGKILL)
            process = pool.members[0].replica._process.process
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def main() -> None:
    path, how, plan = sys.argv[1:]
    recipe = load_recipe(Path(path))
    if not is_rank_zero():
        run_follower(recipe)
        return
    disturbed = Disturbed(recipe.engine.engine, json.loads(plan))
    for call in ("sleep", "wake_weights", "update_weights", "wake_kv_cache"):
        disturbed.wrap(call)
    await train(recipe, resume=how == "resume")


if __name__ == "__main__":
    asyncio.run(main())
