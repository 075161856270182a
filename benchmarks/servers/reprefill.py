"""Processor time of prefill at resume on a real server, by context length, and the simulator's prediction.

A tiny Qwen3 on vLLM or SGLang on a CPU; processor time is that of the server's processes. Two kinds of measurements:

- parts: prefill of one prompt of each length, the same prompt again within a version (the prefix cache serves it), and
  decode steps of `BATCH` samples at each context. A cost model is fitted to them as `april calibrate` does, and a power
  law to the share of a response's time that one resume at its middle takes;
- whole runs: `BATCH` samples decode a response of each length and are interrupted at its middle. Arms: `uninterrupted`;
  `recompute`: a weight update between interrupt and resume; `within a version`: no update, so that the prefix cache
  serves the resume; `keep`: an update on frozen requests. The same calls on a simulated engine with the fitted costs
  are the prediction.

Every arm of a length runs before the next round. The update itself is timed alone and subtracted.

    OMP_NUM_THREADS=1 python benchmarks/servers/reprefill.py --engine vllm
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread
from small_policy import small_policy

from april.engines.servers.launch import Launch, Server, launch_sglang, launch_vllm
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import Chunk, Engine, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample
from april.simulation.calibration import Calibration
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.sweep import Sweep
from april.simulation.virtual_time import run as run_virtually

ROOT = Path(__file__).parents[2]
VOCABULARY, BATCH, PROMPT, DECODE_STEPS = 512, 4, 64, 24
LENGTHS = 1024, 2048, 4096, 8192
CONTEXT = LENGTHS[-1] + 512
KV_TOKENS = 40960
CONNECT: dict[str, Any] = {"vllm": connect_vllm, "sglang": connect_sglang}
ARMS = "uninterrupted", "recompute", "within a version", "keep"
COUNTERS = {
    "engine_steps": "vllm:iteration_tokens_total_count",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_prompt_tokens": "vllm:prompt_tokens_cached_total",
    "request_prefill_seconds": "vllm:request_prefill_time_seconds_sum",
    "preemptions": "vllm:num_preemptions_total",
}
"""Metrics of vLLM that whole runs keep, by our names."""
SLEEPING = """
import time


def register():
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.001)
"""
Marks = list[tuple[str, dict[str, float]]]


class Lengths:
    """Responses that only their budget ends."""

    def lengths(self, prompts: NDArray[np.int64], seeds: NDArray[np.uint64], version: int) -> NDArray[np.int64]:
        return np.full(len(prompts), 1 << 20)


def sleeping_plugin(folder: Path) -> dict[str, str]:
    """Install `SLEEPING` in a folder, and return the environment in which vLLM loads it."""
    metadata = folder / "plugins" / "reprefill-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata.parent / "reprefill_sleeping.py").write_text(SLEEPING)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reprefill\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nsleeping = reprefill_sleeping:register\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(metadata.parent), os.environ.get("PYTHONPATH"))))}


@asynccontextmanager
async def started(kind: str, folder: Path, spin: bool) -> AsyncIterator[tuple[Server, Path]]:
    weights = folder / "model"
    small_policy(VOCABULARY, CONTEXT, layers=2, tied=False).save_pretrained(weights)
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))), "SGLANG_USE_CPU_ENGINE": "1"}
    if kind == "vllm":
        environment |= {} if spin else sleeping_plugin(folder)
        arguments = ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(2**26)]
        arguments += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(BATCH)]
    else:
        arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        arguments += ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle"]
        arguments += ["--max-total-tokens", str(KV_TOKENS), "--mem-fraction-static", "0.5"]
        arguments += ["--context-length", str(CONTEXT), "--max-running-requests", str(BATCH)]
    arguments += ["--skip-tokenizer-init", "--dtype", "float32"]
    python = ROOT / ".servers" / kind / "bin" / "python"
    how = Launch(log_dir=folder, python=python, arguments=arguments, environment=environment)
    async with (launch_vllm if kind == "vllm" else launch_sglang)(weights, how) as server:
        yield server, weights


def cpu_seconds(group: int) -> float:
    """Return the processor time of all live processes of a group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def counters(kind: str, server: Server) -> dict[str, float]:
    """Return processor time of the server, wall clock and, of vLLM, the counters so far."""
    found = {"processor_seconds": cpu_seconds(server.process.pid), "wall_seconds": time.perf_counter()}
    if kind == "vllm":
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        for name, metric in COUNTERS.items():
            found[name] = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric + "{"))
    return found


def between(marks: Marks) -> dict[str, dict[str, float]]:
    """Return what each phase added to the counters; a phase has the name of the mark at its end."""
    phases: dict[str, dict[str, float]] = {}
    for (_, before), (name, after) in itertools.pairwise(marks):
        phases[name] = {each: round(after[each] - before.get(each, 0.0), 3) for each in after}
    return phases


def make(length: int, rng: np.random.Generator) -> list[Sample]:
    sampling = SamplingParams(max_tokens=length, temperature=1.0)
    return [
        Sample(i, 0, tuple(rng.integers(2, VOCABULARY, PROMPT).tolist()), sampling, i, id=f"{rng.integers(1 << 60)}")
        for i in range(BATCH)
    ]


def absorb(chunks: Sequence[Chunk], samples: Sequence[Sample]) -> None:
    named = {sample.id: sample for sample in samples}
    for chunk in chunks:
        assert chunk.error is None, chunk.error
        named[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)


async def until(engine: Engine, samples: Sequence[Sample], tokens: int) -> None:
    while any(sample.length < tokens for sample in samples):
        absorb(await engine.poll(), samples)


async def decoded(
    engine: Engine,
    samples: list[Sample],
    length: int,
    arm: str,
    update: Callable[[], Awaitable[None]],
    mark: Callable[[str], Awaitable[None]] | None = None,
) -> None:
    """Decode responses of `length` tokens, interrupted at the middle unless `arm` is "uninterrupted".

    Args:
        mark: called at the end of each phase with its name.
    """

    async def ended(phase: str) -> None:
        if mark is not None:
            await mark(phase)

    await ended("start")
    for sample in samples:
        engine.submit(sample)
    await until(engine, samples, length // 2)
    await ended("first half")
    if arm != "uninterrupted":
        absorb(await engine.interrupt(), samples)
        await ended("interrupt")
        if arm != "within a version":
            await update()
            await ended("update")
        for sample in samples:
            engine.submit(sample)
    await until(engine, samples, length)
    await ended("second half")
    engine.forget(sample.id for sample in samples)


def predicted(cost: CostModel, length: int, arm: str) -> float:
    """Return the seconds of `decoded` on a simulated engine without the update."""

    async def simulated() -> float:
        # Within a version the KV cache serves a resume, as it does with `keep`.
        kept: KVPolicy = "recompute" if arm == "recompute" else "keep"
        engine = SimulatedEngine(cost, Lengths(), on_update=kept, stream_seconds=cost.decode_seconds[-1])
        await engine.update_weights(0)

        async def update() -> None:
            await engine.update_weights(1)

        await decoded(engine, make(length, np.random.default_rng(0)), length, arm, update)
        return asyncio.get_running_loop().time()

    return run_virtually(simulated())


async def parts(sweep: Sweep, engine: Engine, clock: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Measure prefill and decode steps at each length; return them with the fitted cost model."""
    sweeps, cached = [], {length: [] for length in LENGTHS}
    await sweep.decode(BATCH, 64, 8)  # warm-up
    for _ in range(rounds):
        found = Calibration(BATCH, KV_TOKENS)
        for length in (PROMPT, *LENGTHS):
            found.decoding.append(await sweep.decode(BATCH, length, DECODE_STEPS))
        for length in (256, *LENGTHS):
            found.prefill.append(await sweep.prefill((length,)))
        for length in LENGTHS:
            (first,) = sweep._samples(1, length, 1)
            for again in (False, True):
                sample = dataclasses.replace(first, id=f"{first.id} {again}", segments=[])
                before = clock()
                engine.submit(sample)
                await until(engine, [sample], 1)
                if again:
                    cached[length].append(clock() - before)
        sweeps.append(found)
    median = Calibration.median(sweeps)
    cost = median.fit("measured: processor time of the server")
    return {
        "prefill_seconds": {m.lengths[0]: m.seconds for m in median.prefill},
        "prefill_seconds_with_cached_prefix": {length: spread(each) for length, each in cached.items()},
        "decode_step_seconds": {round(m.kv_tokens): m.seconds for m in median.decoding},
        "cost_model": dataclasses.asdict(cost),
    }


def power_law(shares: dict[int, float]) -> float:
    """Return the exponent of the least-squares power law."""
    lengths, values = np.log(list(shares)), np.log(list(shares.values()))
    return float(np.polyfit(lengths, values, 1)[0])


def shares_of(cost: CostModel) -> dict[int, float]:
    """Return the share of the time of `decoded` that the resume takes, by the cost model."""
    without = {length: predicted(cost, length, "uninterrupted") for length in LENGTHS}
    return {length: 1 - without[length] / predicted(cost, length, "recompute") for length in LENGTHS}


async def measure(options: argparse.Namespace, folder: Path) -> None:
    rng, results = np.random.default_rng(0), dict[str, Any]()
    version = 0
    async with started(options.engine, folder, options.spin) as (server, weights):

        def clock() -> float:
            return cpu_seconds(server.process.pid)

        async def connected(on_update: KVPolicy) -> Any:
            return await CONNECT[options.engine](server.url, on_update=on_update)

        def record() -> None:
            about = {
                "batch": BATCH,
                "prompt_tokens": PROMPT,
                "lengths": LENGTHS,
                "clock": "processor time of the server",
            }
            save(__file__, {**about, **results}, f"{options.engine}{'_spin' * options.spin}")

        engine = await connected("recompute")

        async def update() -> None:
            nonlocal version
            version += 1
            before = clock()
            await engine.update_weights(version, weights)
            updates.append(clock() - before)

        async def update_to(_: int) -> None:
            await update()

        updates: list[float] = []
        await update()
        sweep = Sweep(engine, update_to, "recompute", rng, VOCABULARY, clock)
        results["parts"] = await parts(sweep, engine, clock, options.rounds)
        cost = CostModel(**{**results["parts"]["cost_model"], "errors": {}})
        shares = await asyncio.to_thread(shares_of, cost)
        results["resume_share_by_parts"], results["exponent"] = shares, power_law(shares)
        print(results, flush=True)
        record()
        seconds: dict[int, dict[str, list[float]]] = {}
        phases: dict[int, dict[str, list[Any]]] = {}
        for number, length in ((n, length) for length in options.whole for n in range(options.rounds)):
            for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                marks: Marks = []

                async def mark(phase: str, marks: Marks = marks) -> None:
                    marks.append((phase, await counters(options.engine, server)))

                await engine.close()
                engine = await connected("keep" if arm == "keep" else "recompute")
                await update()
                updates.clear()
                before = clock()
                await decoded(engine, make(length, rng), length, arm, update, mark)
                spent = clock() - before - sum(updates)
                phases.setdefault(length, {}).setdefault(arm, []).append(between(marks))
                seconds.setdefault(length, {}).setdefault(arm, []).append(spent)
                print(length, number, arm, round(spent, 2), phases[length][arm][-1], flush=True)
            results["whole"] = {
                at: {
                    arm: {
                        "seconds": spread(each),
                        "over_uninterrupted": spread([a / b for a, b in zip(each, by["uninterrupted"], strict=True)]),
                    }
                    for arm, each in by.items()
                }
                for at, by in seconds.items()
            }
            results["phases"] = phases
            for at, by in results["whole"].items():
                alone = await asyncio.to_thread(predicted, cost, at, "uninterrupted")
                for arm in by:
                    by[arm]["predicted_over_uninterrupted"] = (
                        await asyncio.to_thread(predicted, cost, at, arm)
                    ) / alone
            record()
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=CONNECT, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", type=int, nargs="*", default=[1024, 2048], help="response lengths of whole runs")
    parser.add_argument("--spin", action="store_true", help="vLLM as shipped: its processes wait in a busy loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
