"""A task set with one turn: the policy names the greatest common divisor. Its harness works in verifiers' process."""

from __future__ import annotations

import asyncio
import math
import os
import time

import openai
import verifiers.v1 as vf

PAIRS = [(a, b) for a in range(2, 8) for b in range(2, 8)]


class Pair(vf.TaskData):
    a: int
    b: int


class Words(vf.Task[Pair]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = trace.branches[-1].messages[-1].content or ""
        fault = os.environ.get("FAULT")
        if fault == "raise":
            raise KeyError("the rubric fails")
        if fault == "hang":
            time.sleep(3600)
        if fault == "wait":
            await asyncio.sleep(3600)
        return float(str(math.gcd(self.data.a, self.data.b)) in said)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content or ""))


class WordsTasks(vf.Taskset[Words]):
    def load(self):
        return [Words(Pair(a=a, b=b, prompt=f"gcd({a}, {b})?")) for a, b in PAIRS]


class Once(vf.Harness[vf.HarnessConfig]):
    """Asks once, from this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Once", "WordsTasks"]
