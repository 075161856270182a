"""256 agent episodes at once on a real server, whose turns have a heavy tail: partial against synchronous rollouts.

Each episode is a program that sends chat requests with its whole history to april's gateway, over HTTP. A request
limits its turn (`max_tokens`) to a length from a lognormal distribution, and nothing else ends a turn, so all
arms draw turns of equal lengths for equal episodes. The same weights are sent to the server after every step, as if
they had changed. Arms, with the same slots of the server:

- `sync N`: synchronous, N groups a step;
- `sync N'`: synchronous, N' groups a step, with the episodes at once of the partial arm;
- `partial`: N' groups in flight, N a step; turns are interrupted and resumed with their KV cache, with a bound of 5.

All arms run on one server in turn, a block of N' groups each, round after round. The tokens of the policy in the
groups of the steps are divided by wall-clock seconds, by processor seconds of the server and by its passes.
A pass is one iteration of the server's engine: vLLM counts them itself, SGLang writes a line of its log for each.

The gateway's processor time covers its HTTP connections, from the bytes of a request to the bytes of its response,
with the conversation tree and the rendering, and without program, scheduler and engine client.

    OMP_NUM_THREADS=1 python benchmarks/servers/agent_episodes.py --engine vllm
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import tempfile
import time
import types
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from serving import CONNECT, CONTEXT, ROOT, make_policy, processor_seconds, save, spread, start

from april.engines.servers.launch import Server
from april.gateway.access import Access
from april.gateway.agent import Program, ProgramAgents
from april.gateway.server import Gateway
from april.rendering.template_reader import TemplateReader
from april.rollout.episodes.agent_episodes import AgentEpisodes
from april.rollout.episodes.turns import AgentOutcome, AgentStart
from april.rollout.params import EpisodeLimits, RolloutParams
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.prompt import Prompt

MORE = {"vllm": (), "sglang": ("--decode-log-interval", "1")}
"""Further options of the servers, which make passes countable."""
RESULT = "The tests of the module ran; two failed, in the parser and in the cache. What next?"
"""The program's message after each turn."""


@dataclass(frozen=True)
class Workload:
    """Groups and turns. Turns have lognormal lengths in tokens, between 1 and `longest`."""

    batch: int = 16
    over_sampling: int = 32
    group: int = 8
    turns: int = 4
    median: float = 12.0
    sigma: float = 1.3
    longest: int = 400

    def lengths(self, key: str) -> list[int]:
        """Lengths of the turns of the episode `key`."""
        draw = random.Random(key)
        drawn = (draw.lognormvariate(0, self.sigma) for _ in range(self.turns))
        return [int(np.clip(self.median * one, 1, self.longest)) for one in drawn]


class Meter:
    """Processor seconds of the gateway in this thread, and its requests."""

    def __init__(self) -> None:
        self.seconds, self.requests = 0.0, 0
        self._inside = False

    def call(self, function: Any, *args: Any) -> Any:
        if self._inside:
            return function(*args)
        self._inside, began = True, time.thread_time()
        try:
            return function(*args)
        finally:
            self._inside = False
            self.seconds += time.thread_time() - began

    @types.coroutine
    def steps(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a coroutine, and count the time of its steps but not its waits."""
        resume, value = coroutine.send, None
        try:
            while True:
                waits = self.call(resume, value)
                try:
                    resume, value = coroutine.send, (yield waits)
                except BaseException as error:
                    resume, value = coroutine.throw, error  # type: ignore[assignment]
        except StopIteration as end:
            return end.value


class MeteredGateway(Gateway):
    """A gateway that counts its processor time, with the time of aiohttp's protocol."""

    def __init__(self, meter: Meter, *args: Any) -> None:
        super().__init__(*args)
        self._meter = meter
        receive, serve = RequestHandler.data_received, RequestHandler.start

        def data_received(handler: Any, data: bytes) -> None:
            meter.call(receive, handler, data)

        async def start(handler: Any) -> None:
            await meter.steps(serve(handler))

        RequestHandler.data_received, RequestHandler.start = data_received, start  # type: ignore[method-assign]

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        self._meter.requests += 1
        response: web.StreamResponse = await self._meter.steps(super()._handle(http))
        return response


class Chat(Program):
    """The program: every turn is answered with the same message."""

    def __init__(self, workload: Workload, http: aiohttp.ClientSession) -> None:
        self._workload, self._http = workload, http

    async def play(self, start: AgentStart, access: Access) -> AgentOutcome:
        messages: list[Any] = [{"role": "user", "content": f"Repair build {start.row['number']}."}]
        for length in self._workload.lengths(start.key):
            body = {"model": access.model, "messages": messages, "max_tokens": length}
            headers = {"Authorization": f"Bearer {access.secret}"}
            async with self._http.post(f"{access.address}/v1/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] == length, answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": RESULT}]
        return AgentOutcome(0.0)


def prompts() -> Iterator[Prompt]:
    for number in itertools.count():
        yield Prompt((2,), f"build {number}", {"number": number})


class Passes:
    """Passes of a server so far."""

    def __init__(self, kind: str, server: Server) -> None:
        self._kind, self._server = kind, server

    async def count(self) -> int:
        if self._kind == "sglang":
            await asyncio.sleep(0.5)  # the log is written by another process
            return len(re.findall(r"(?:Decode|Prefill) batch", self._server.log.read_text(errors="replace")))
        async with aiohttp.ClientSession(self._server.url) as http, http.get("/metrics") as response:
            found = re.search(r"^vllm:iteration_tokens_total_count\S* (\S+)$", await response.text(), re.MULTILINE)
        assert found is not None, "vLLM does not report its iterations"
        return int(float(found[1]))


class Arm:
    """One way of collecting, and its figures.

    Args:
        groups: groups in flight.
        batch: groups of a step.
    """

    def __init__(self, run: Run, name: str, groups: int, batch: int, partial: bool) -> None:
        self.run, self.name, self.batch = run, name, batch
        self.meter = Meter()
        self.gateway = MeteredGateway(self.meter, None, run.renderer, run.renderer)
        agents = ProgramAgents(Chat(run.workload, run.http), self.gateway)
        limits = EpisodeLimits(concurrency=groups * run.workload.group)
        episodes = AgentEpisodes(agents, run.renderer, CONTEXT, limits)
        self.gateway.policy, agents.conversations = episodes, episodes.conversations
        longest = run.workload.turns * run.workload.longest
        self.scheduler = RolloutScheduler(
            None,  # type: ignore[arg-type]  # an engine for every block
            prompts(),
            lambda prompt, sample: 0.0,
            RolloutParams(
                rollout_batch_size=batch,
                over_sampling_batch_size=groups,
                n_samples_per_prompt=run.workload.group,
                partial_rollout=partial,
                max_staleness=5,
            ),
            sampling=SamplingParams(longest, max_turns=run.workload.turns + 1),
            episodes=episodes,
        )
        self.staleness: list[float] = []
        self.resumed = 0

    async def block(self, groups: int) -> dict[str, float]:
        """Train on that many groups. Episodes in flight at the end are resumed in the next block."""
        scheduler, run = self.scheduler, self.run
        scheduler.engine = await CONNECT[run.kind](run.server.url, on_update="keep")
        await scheduler.update_weights(run.model, version=scheduler.engine_version)
        seconds, requests = self.meter.seconds, self.meter.requests
        passes, server = await run.passes.count(), processor_seconds(run.server)
        own, began, tokens = time.process_time(), time.perf_counter(), 0
        for _ in range(groups // self.batch):
            step = await scheduler.next_batch()
            tokens += sum(sample.policy_tokens for group in step.groups for sample in group.samples)
            self.staleness += step.staleness.tolist()
            self.resumed += step.resumed_samples
            await scheduler.update_weights(run.model)
        elapsed, own = time.perf_counter() - began, time.process_time() - own
        server = processor_seconds(run.server) - server
        passes = await run.passes.count() - passes
        await scheduler.engine.close()  # a server that is frozen for one arm would keep the next one waiting
        scheduler.buffer.check()
        asked = self.meter.requests - requests
        return {
            "consumed tokens": tokens,
            "consumed tokens a second": tokens / elapsed,
            "consumed tokens a processor second of the server": tokens / server,
            "consumed tokens a pass": tokens / passes,
            "passes": passes,
            "requests": asked,
            "gateway processor milliseconds a request": 1000 * (self.meter.seconds - seconds) / asked,
            "april and program processor milliseconds a request": 1000 * own / asked,
        }


@dataclass(frozen=True)
class Run:
    """What the arms share."""

    kind: str
    server: Server
    model: Path
    workload: Workload
    renderer: TemplateReader
    http: aiohttp.ClientSession

    @property
    def passes(self) -> Passes:
        return Passes(self.kind, self.server)


RATES = [f"consumed tokens a {unit}" for unit in ("second", "processor second of the server", "pass")]


async def measure(run: Run, rounds: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the figures of all arms after each round."""
    small, large = run.workload.batch, run.workload.over_sampling
    arms = [
        Arm(run, "sync N", small, small, partial=False),
        Arm(run, "sync N'", large, large, partial=False),
        Arm(run, "partial", large, small, partial=True),
    ]
    blocks: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    async with AsyncExitStack() as stack:
        for arm in arms:
            await stack.enter_async_context(arm.gateway)
            await stack.enter_async_context(arm.scheduler)
        print("warm", await arms[-1].block(large), flush=True)  # its buffer is empty and caches are cold
        arms[-1].staleness.clear()
        arms[-1].resumed = 0
        for round in range(rounds):
            for arm in arms if round % 2 else arms[::-1]:
                blocks[arm.name].append(await arm.block(large))
                print(run.kind, arm.name, blocks[arm.name][-1], flush=True)
            yield {arm.name: summary(arm, blocks[arm.name], blocks["sync N"]) for arm in arms}


def summary(arm: Arm, own: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "figures": {name: spread([block[name] for block in own]) for name in own[0]},
        "ratio_to_sync_N": {
            name: spread([a[name] / b[name] for a, b in zip(own, base, strict=True)]) for name in RATES
        },
        "staleness": {"mean": float(np.mean(arm.staleness)), "max": int(np.max(arm.staleness))},
        "samples_resumed": arm.resumed,
        "discarded_tokens": arm.scheduler.buffer.discarded_tokens,
    }


def renderer() -> TemplateReader:
    import sys

    sys.path.insert(0, str(ROOT))
    from tests.rendering.tokenizers import tokenizer

    tokens = tokenizer("qwen2_5")
    return TemplateReader(tokens, [tokens.eos_token_id])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*CONNECT], required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few short episodes, nothing saved")
    args = parser.parse_args()
    workload = Workload(batch=1, over_sampling=2, longest=20) if args.quick else Workload()
    slots = workload.over_sampling * workload.group
    with tempfile.TemporaryDirectory() as folder:
        model = make_policy(Path(folder) / "policy")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()) as http,
            start(args.engine, model, Path(folder), slots, MORE[args.engine]) as server,
        ):
            run = Run(args.engine, server, model, workload, renderer(), http)
            settings = {"workload": vars(workload), "slots": slots}
            async for arms in measure(run, 1 if args.quick else args.rounds):
                if not args.quick:
                    print(save(__file__, args.engine, {**settings, "arms": arms}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
