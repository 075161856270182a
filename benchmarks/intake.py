"""Cost of reading the tokens of GPU servers: processor time per token, in the driver and in its clients.

Servers that only play back (`playback.py`, processes of their own) send 256 streams a replica over real HTTP, in vLLM's
or SGLang's format, at 60 tokens/s each, 60 tokens an event. The driver is the same as in a run: the scheduler with its
journal, over a pool of replicas; the streams of many replicas are read by one process for each 4,096. Two cores cannot
play back and read a million tokens/s: with many replicas each stream plays as slowly as the machine needs, in events of
the same size, and the figure is processor time per token, of each process by itself. Other load affects it only through
colder caches. The wall-clock time of an interrupt is at most the sum of driver and slowest client, if each has its own
core; here they share two cores with the servers.

Every token and log-probability is checked against the played ones, before and after an interrupt of all streams, and
the number of tokens against the servers' counts.

    python benchmarks/intake.py [--replicas 1 64] [--kind vllm sglang]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from playback import PERIOD, SLOTS, VOCABULARY, logprob_at, token_at
from record import save, spread

from april import Prompt, RolloutParams, RolloutScheduler, SamplingParams
from april.engines.pool import EnginePool
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.stream_reader import StreamReader
from april.engines.servers.vllm import connect_vllm
from april.rollout.journal.journal import Journal

CONNECT: dict[str, Any] = {"vllm": connect_vllm, "sglang": connect_sglang}
TICKS = os.sysconf("SC_CLK_TCK")
TOKENS = np.array([token_at(0, i) for i in range(PERIOD)])
LOGPROBS = np.array([logprob_at(0, i) for i in range(PERIOD)], dtype=np.float32)
PROMPT = 64
EVENT = 60
"""Tokens of an event: the choice of "auto" at 60 tokens/s, set because the machine may not reach that speed."""
SETTINGS = json.dumps({"stream_interval": EVENT, "patience": 300.0})
"""Two cores that play 16,384 streams back and read them are slow to answer: neither interrupts nor health checks are
cut short for that."""


def processor_seconds(pid: int) -> float:
    """What a process has used so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children() -> list[int]:
    """This process's own children."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@asynccontextmanager
async def playing(kind: str, replicas: int, rate: float, processes: int) -> AsyncIterator[tuple[list[str], set[int]]]:
    """URLs of `replicas` servers in processes of their own, and the processes."""
    script = Path(__file__).with_name("playback.py")
    started = []
    urls = []
    try:
        for index in range(processes):
            share = len(range(index, replicas, processes))
            arguments = ["--kind", kind, "--replicas", str(share), "--rate", str(rate)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, script, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            started.append(process)
        for process in started:
            assert process.stdout is not None
            urls += [f"http://127.0.0.1:{port}" for port in json.loads(await process.stdout.readline())]
        yield urls, {process.pid for process in started}
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def played(urls: list[str]) -> tuple[int, int]:
    """Tokens sampled by all servers, and how many of them were sent."""
    async with aiohttp.ClientSession() as session:
        answers = []
        for url in urls:
            async with session.get(url + "/played") as response:
                answers.append(await response.json())
    return sum(answer["sampled"] for answer in answers), sum(answer["sent"] for answer in answers)


def check(scheduler: RolloutScheduler) -> int:
    """Check that every sample contains exactly its played tokens; return the number of tokens."""
    tokens = 0
    for group in scheduler.buffer:
        for sample in group.samples:
            ids, first = sample.response_ids, sample.prompt_ids[0]
            where = (first * 7919 + np.arange(len(ids))) % PERIOD
            assert np.array_equal(TOKENS[where], ids), f"sample {sample.id}: other tokens came than were played"
            assert np.array_equal(LOGPROBS[where], sample.logprobs), f"sample {sample.id}: other log-probabilities"
            tokens += len(ids)
    return tokens


async def score(prompt: Prompt, sample: Any) -> float:
    return 0.0


class Use:
    """Processor seconds since it was made: of this process, of those that read streams, and of those that play."""

    def __init__(self, players: set[int]) -> None:
        self._clients, self._players = [pid for pid in children() if pid not in players], sorted(players)
        self._before = self._now()

    def _now(self) -> dict[str, list[float]]:
        others = {"clients": self._clients, "servers": self._players}
        used = {who: [*map(processor_seconds, pids)] for who, pids in others.items()}
        return {"driver": [time.process_time()], **used}

    def since(self) -> dict[str, list[float]]:
        """By who it is, of each process."""
        now = self._now()
        return {who: [b - a for a, b in zip(self._before[who], now[who], strict=True)] for who in now}


async def run(scheduler: RolloutScheduler, seconds: float, players: set[int]) -> dict[str, float]:
    """Generate for a while after warming up, then interrupt everything."""
    collecting = asyncio.create_task(scheduler.next_batch())
    began = time.perf_counter()
    # Every stream is up, and the first events, of a token each, are over.
    before = {sample.id: sample.length for group in scheduler.buffer for sample in group.samples}

    def under_way() -> bool:
        samples = [sample for group in scheduler.buffer for sample in group.samples]
        return len(samples) > 0 and all(sample.length > before.get(sample.id, 0) + 16 for sample in samples)

    while time.perf_counter() < began + seconds / 2 or not under_way():
        await asyncio.sleep(0.2)
        assert not collecting.done(), collecting.exception()
    tokens, wall, use = scheduler.step_tokens, time.perf_counter(), Use(players)
    # On a machine that others use it may take longer until every stream has sent something.
    while time.perf_counter() < wall + seconds or scheduler.step_tokens < tokens + EVENT * scheduler.in_flight:
        await asyncio.sleep(0.2)
    wall, used = time.perf_counter() - wall, use.since()
    tokens = scheduler.step_tokens - tokens
    streams = scheduler.in_flight
    began, use = time.perf_counter(), Use(players)
    collecting.cancel()
    with suppress(asyncio.CancelledError):
        await collecting
    interrupted, stopped = time.perf_counter() - began, use.since()
    assert not collecting.cancelled() or scheduler.in_flight == 0
    return {
        "tokens_per_second": tokens / wall,
        **{f"{who}_us_per_token": 1e6 * sum(seconds) / tokens for who, seconds in used.items()},
        "streams": streams,
        "interrupt_seconds": interrupted,
        **{f"interrupt_{who}_cpu_seconds": sum(seconds) for who, seconds in stopped.items()},
        "interrupt_slowest_client_cpu_seconds": max(stopped["clients"], default=0.0),
    }


async def measure(kind: str, replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    """Some runs on the same servers, each with an interrupt, every token checked."""
    processes, rate = min(replicas, args.processes), min(args.rate, args.playable / (replicas * SLOTS))
    async with playing(kind, replicas, rate, processes) as (urls, servers):
        settings = {"vocab_size": VOCABULARY, **json.loads(args.settings)}
        engines = [await CONNECT[kind](url, **settings) for url in urls]
        intakes = [
            StreamReader(f"stream reader {i}") for i in range(args.intakes if replicas > 1 or args.always else 0)
        ]
        for engine_, intake in zip(engines, itertools.cycle(intakes), strict=False):
            await engine_.use_reader(intake)
        engine = EnginePool(engines, health_timeout=120.0)
        groups, size = replicas * SLOTS // 8, 8
        prompts = (Prompt((i, PROMPT, *range(2, PROMPT)), str(i)) for i in itertools.count())
        params = RolloutParams(
            rollout_batch_size=groups, over_sampling_batch_size=groups, n_samples_per_prompt=size, max_staleness=None
        )
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder) / "journal")
            scheduler = RolloutScheduler(
                engine, prompts, score, params, sampling=SamplingParams(args.tokens), journal=journal
            )
            runs = []
            async with scheduler:
                for _ in range(args.runs + 1):
                    runs.append(await run(scheduler, args.seconds, servers))
                    print(f"{kind} x {replicas}:", {name: round(value, 3) for name, value in runs[-1].items()})
                    held = check(scheduler)
                    sampled, sent = await played(urls)
                    assert held == sampled == sent, f"{held} tokens arrived of {sampled} sampled, {sent} sent"
            journal.close()
        await engine.close()
        for intake in intakes:
            await intake.close()
    # The first run begins all requests; the later ones resume them, as steps of a run do.
    results = {name: spread([one[name] for one in runs[1:]]) for name in runs[0]}
    counts = {"tokens_checked": held, "tokens_lost": sampled - held}
    return {"rate": rate, "server_processes": processes, "intakes": len(intakes), **results, **counts}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=CONNECT, default=list(CONNECT))
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--rate", type=float, default=60.0, help="tokens/s of each stream")
    parser.add_argument("--playable", type=float, default=65_000, help="tokens/s of all streams together, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--runs", type=int, default=3, help="measurements after the first, which is left out")
    parser.add_argument("--processes", type=int, default=2, help="processes that play back, at most")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="response budget")
    parser.add_argument("--settings", default=SETTINGS, help="of the clients, as JSON")
    parser.add_argument("--intakes", type=int, default=4, help="processes that read the streams of many replicas")
    parser.add_argument("--always", action="store_true", help="those of one replica as well")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    parser.add_argument("--variant", default="", help="of the file that the figures go to")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in args.kind:
        for replicas in args.replicas:
            results[f"{kind}, {replicas} replicas"] = await measure(kind, replicas, args)
    if not args.dry:
        figures = {"streams_per_replica": SLOTS, "settings": args.settings, "results": results}
        print(save(__file__, figures, args.variant))


if __name__ == "__main__":
    asyncio.run(main())
