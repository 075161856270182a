"""april's clients against a bare aiohttp loop on the same server: 1, 64 and 256 streams at a time.

Both send the same requests and end up with every token id and log-probability in a list. The bare loop reads lines,
decodes their JSON, and does nothing else: no checks, no versions, no interrupts. Pairs are interleaved, in alternating
order; the ratio is of tokens/s, april's over the bare loop's. The client's own processor time per token is reported as
well: on a shared machine it is more reliable.

    python benchmarks/servers/client_overhead.py [--engine vllm] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from serving import CONNECT, make_policy, save, spread, start

from april.engines.servers.server import ServerEngine
from april.engines.servers.stream import Stream
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

SLOTS = 256


def make_samples(streams: int, tokens: int, first: int) -> list[Sample]:
    sampling = SamplingParams(tokens)
    return [Group.start(first + i, Prompt((5, 6, 7 + i)), 1, sampling, 0).samples[0] for i in range(streams)]


async def ours(engine: ServerEngine, samples: list[Sample]) -> None:
    by_id = {sample.id: sample for sample in samples}
    for sample in samples:
        engine.submit(sample)
    left = len(samples)
    while left:
        for chunk in await engine.poll():
            assert chunk.error is None, chunk.error
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            left -= chunk.finish is not None


async def bare(session: aiohttp.ClientSession, path: str, bodies: list[dict[str, Any]]) -> int:
    return sum(await asyncio.gather(*(follow(session, path, body) for body in bodies)))


async def follow(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> int:
    ids: list[int] = []
    logprobs: list[float] = []
    async with session.post(path, json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "choices" in event:
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            else:
                ids += event["output_ids"]
                logprobs += [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]
    assert len(ids) == len(logprobs)
    return len(ids)


def requests_of(engine: ServerEngine, samples: list[Sample]) -> tuple[str, list[dict[str, Any]]]:
    """URL and body of the engine's requests for these samples."""
    streams = [
        Stream(s.id, f"bare-{s.id}", list(s.prompt_ids), s.sampling, s.seed, s.sampling.max_tokens, 0, 2**31)
        for s in samples
    ]
    paths, bodies = zip(*(engine.requests.request(stream) for stream in streams), strict=True)
    return paths[0], list(bodies)


async def measure(kind: str, url: str, pairs: int, tokens: int, sizes: list[int]) -> dict[str, Any]:
    engine = await CONNECT[kind](url)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    timeout = aiohttp.ClientTimeout(total=None)
    results: dict[str, Any] = {}
    first = 0
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=2**16) as session:
        for streams in sizes:
            rates: dict[str, list[float]] = {"ours": [], "bare": []}
            work: dict[str, list[float]] = {"ours": [], "bare": []}
            # A single stream is short: more of them in a row, so that a measurement lasts.
            turns = max(1, 8 // streams)
            for pair in range(pairs + 1):
                for arm in ("ours", "bare") if pair % 2 else ("bare", "ours"):
                    elapsed, cpu = 0.0, time.process_time()
                    for _ in range(turns):
                        samples = make_samples(streams, tokens, first)
                        first += streams
                        path, bodies = requests_of(engine, samples)
                        began = time.perf_counter()
                        if arm == "ours":
                            await ours(engine, samples)
                        else:
                            assert await bare(session, path, bodies) == streams * tokens
                        elapsed += time.perf_counter() - began
                    if pair:  # the first pair warms up
                        rates[arm].append(turns * streams * tokens / elapsed)
                        work[arm].append(1e6 * (time.process_time() - cpu) / (turns * streams * tokens))
            ratios = [a / b for a, b in zip(rates["ours"], rates["bare"], strict=True)]
            results[str(streams)] = {
                "ours_tokens_per_s": spread(rates["ours"]),
                "bare_tokens_per_s": spread(rates["bare"]),
                "ratio": spread(ratios),
                "ours_cpu_us_per_token": spread(work["ours"]),
                "bare_cpu_us_per_token": spread(work["bare"]),
            }
            print(
                f"{kind}, {streams} streams:",
                {name: round(x["median"], 3) for name, x in results[str(streams)].items()},
            )
    await engine.close()
    return results


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*CONNECT, "both"], default="both")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every response")
    parser.add_argument("--quick", action="store_true", help="two pairs of short responses, nothing saved")
    parser.add_argument("--log-dir", type=Path, help="where the servers' logs are kept; not kept if not given")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.tokens = 2, 32
    with tempfile.TemporaryDirectory() as folder:
        model = make_policy(Path(folder) / "policy")
        for kind in CONNECT if args.engine == "both" else [args.engine]:
            async with start(kind, model, args.log_dir or Path(folder), SLOTS) as server:
                results = await measure(kind, server.url, args.pairs, args.tokens, [1, 64, 256])
            if not args.quick:
                print(save(__file__, kind, {"tokens": args.tokens, "pairs": args.pairs, "streams": results}))


asyncio.run(main())
