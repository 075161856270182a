"""Predicted against measured consumed tokens/s, on a real engine.

Each setting runs for real between two sweeps of the engine's calibration, as `april calibrate` makes them, and then in
virtual time on the cost model fitted to these two sweeps. Such a pair gives a ratio: a machine whose speed drifts slows
both. The results are medians over several pairs, with their spread. Both get the same samples with the same lengths (a
layer in front of the real engine ends each of them there), so that only the cost model differs. The policy is random.

    OMP_NUM_THREADS=1 python benchmarks/simulation/predicted_vs_measured.py --engine embedded
    OMP_NUM_THREADS=1 python benchmarks/simulation/predicted_vs_measured.py --engine vllm --slots 16

Engines with different slots or KV policies are different engines, each with its own calibration. Without `--slots` and
`--on-update` all of them are run, each for `--seconds`. Every pair is added to the JSON file at once; the setting with
the fewest pairs is measured next.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread
from small_policy import small_policy

from april.engines.embedded import EmbeddedEngine
from april.rollout.engine import Engine, KVPolicy
from april.simulation.calibration import Calibration
from april.simulation.measurement import serve
from april.simulation.run import Outcome, simulate
from april.simulation.sweep import Sweep
from april.simulation.workload import Part, Workload

ROOT = Path(__file__).parents[2]
CONTEXT, VOCABULARY, LONGEST, DECODE_STEPS = 768, 512, 192, 16
LOGNORMAL = Workload(
    "lognormal",
    (Part(48, 0.8),),
    max_tokens=256,
    correlation=0.6,
    prompt_tokens=48,
    rollout_batch_size=12,
    n_samples_per_prompt=4,
)
HEAVY = replace(LOGNORMAL, name="heavy", parts=(Part(24, 1.2),))
BIMODAL = replace(LOGNORMAL, name="bimodal", parts=(Part(24, 0.4, 0.75), Part(160, 0.3, 0.25)))


@dataclass(frozen=True, eq=False)
class Setting:
    """Settings of the scheduler, on an engine of `slots` slots."""

    scheduler: dict[str, Any]
    workload: Workload = LOGNORMAL
    slots: int = 32
    on_update: KVPolicy = "recompute"

    @property
    def name(self) -> str:
        target = self.scheduler.get("over_sampling_batch_size")
        steps = "synchronous" if target is None else f"N' = {target}"
        size = self.scheduler.get("rollout_batch_size", self.workload.rollout_batch_size)
        return f"{steps}, N = {size}, {self.workload.name}, {self.slots} slots, {self.on_update}"


def partial(target: int, **more: Any) -> dict[str, Any]:
    return {"over_sampling_batch_size": target, **more}


SYNCHRONOUS = {"partial_rollout": False}
SETTINGS = [
    Setting(SYNCHRONOUS),
    Setting(partial(18)),
    Setting(partial(24), HEAVY),
    Setting(partial(36, rollout_batch_size=24)),
    Setting(partial(24), on_update="keep"),
    Setting(partial(36), BIMODAL, on_update="keep"),
    Setting(SYNCHRONOUS, BIMODAL, slots=16),
    Setting(partial(18), HEAVY, slots=16),
]

CLOCKS = {"embedded": time.process_time, "vllm": time.perf_counter, "sglang": time.perf_counter}
"""The embedded engine runs in this process on one thread and waits for nothing, so its CPU time is what its wall clock
would be on a machine of its own; that keeps other processes' time slices out of calibration and measurement alike."""


@asynccontextmanager
async def engine_of(
    args: argparse.Namespace, slots: int, on_update: KVPolicy, folder: Path
) -> AsyncIterator[tuple[Engine, Any]]:
    """The engine, and what `update_weights` is to be given."""
    model = small_policy(VOCABULARY, CONTEXT, args.layers, tied=True)
    if args.engine == "embedded":
        engine = EmbeddedEngine(model, max_num_seqs=slots, context_length=CONTEXT, on_update=on_update)
        yield engine, None
        return
    from april.engines.servers.launch import Launch, launch_sglang, launch_vllm
    from april.engines.servers.sglang import connect_sglang
    from april.engines.servers.vllm import connect_vllm

    weights = folder / "model"
    model.save_pretrained(weights)
    common: dict[str, Any] = {"log_dir": folder, "python": ROOT / ".servers" / args.engine / "bin" / "python"}
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if args.engine == "vllm":
        core = str(min(os.sched_getaffinity(0)))
        arguments = ["--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--block-size", "32"]
        arguments += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(slots)]
        # No prefill is split over steps: with a seed of its own, such a request ended the CPU engine.
        arguments += ["--kv-cache-memory-bytes", str(2**27), "--max-num-batched-tokens", "32768"]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = core
        how = Launch(arguments=arguments, environment=environment, **common)
        server, connect = launch_vllm(weights, how), connect_vllm
    else:
        arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        arguments += ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle", "--dtype", "float32"]
        arguments += ["--max-total-tokens", "32768", "--mem-fraction-static", "0.1", "--skip-tokenizer-init"]
        arguments += ["--max-running-requests", str(slots), "--context-length", str(CONTEXT)]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT / "tests" / "servers" / "sglang_cpu")}
        how = Launch(arguments=arguments, environment=environment, **common)
        server, connect = launch_sglang(weights, how), connect_sglang
    async with server as started:
        engine = await connect(started.url, on_update=on_update)
        try:
            yield engine, weights
        finally:
            await engine.close()


async def measure(
    args: argparse.Namespace, slots: int, on_update: KVPolicy, results: dict[str, Any], folder: Path
) -> None:
    """Pair after pair of the settings of one engine, until `args.seconds` are over."""
    settings = [setting for setting in SETTINGS if (setting.slots, setting.on_update) == (slots, on_update)]
    clock, rng = CLOCKS[args.engine], np.random.default_rng(len(results))
    async with engine_of(args, slots, on_update, folder) as (engine, weights):

        async def update(version: int) -> None:
            await engine.update_weights(version, weights)

        sweep = Sweep(engine, update, on_update, rng, VOCABULARY, clock)

        async def swept() -> Calibration:
            return await sweep.all(slots, LONGEST, DECODE_STEPS, lambda _: None)

        await sweep.serve("warm-up", LONGEST / 8, LONGEST, 1, SETTINGS[0].workload.rollout_batch_size)
        began = time.perf_counter()
        before = await swept()
        while (passed := time.perf_counter() - began) < args.seconds:
            setting = min(settings, key=lambda setting: len(results.get(setting.name, {}).get("rounds", ())))
            measured = await serve(
                engine,
                setting.workload,
                update,
                steps=args.steps,
                warm_up=args.warm_up,
                vocabulary=VOCABULARY,
                rng=rng,
                clock=clock,
                **setting.scheduler,
            )
            after = await swept()
            calibration = Calibration.median([before, after])
            before = after
            # In a thread, because virtual time is an event loop of its own.
            error = await asyncio.to_thread(compare, args, setting, calibration, measured, results)
            rate = measured.consumed_tokens_per_second
            print(f"{passed:.0f} s: {setting.name}: {rate:,.0f} tokens/s, prediction off by {error:+.1%}", flush=True)


def compare(
    args: argparse.Namespace, setting: Setting, calibration: Calibration, measured: Outcome, results: dict[str, Any]
) -> float:
    """Add the error of the prediction to earlier rounds."""
    cost = calibration.fit(f"measured: {args.engine}")
    predicted = simulate(
        setting.workload,
        cost,
        steps=args.steps,
        warm_up=args.warm_up,
        on_update=setting.on_update,
        **setting.scheduler,
    )
    error = predicted.consumed_tokens_per_second / measured.consumed_tokens_per_second - 1
    rounds = results.get(setting.name, {}).get("rounds", [])
    rounds.append(
        {"error": error, "predicted": _account(predicted), "measured": _account(measured), "fit": cost.errors}
    )
    results[setting.name] = {
        "error": spread([each["error"] for each in rounds]),
        "rounds": rounds,
        "last_cost_model": dataclasses.asdict(cost),
    }
    names = [setting.name for setting in SETTINGS if setting.name in results]
    summary = {
        "command": f"python benchmarks/simulation/{Path(__file__).name} --engine {args.engine}",
        "clock": "CPU time of the process" if args.engine == "embedded" else "wall clock",
        "steps": args.steps,
        "warm_up": args.warm_up,
        "largest_error": max(abs(results[name]["error"]["median"]) for name in names),
        "settings": {name: results[name] for name in names},
    }
    save(__file__, summary, args.engine)
    return error


def results_of(engine: str) -> Path:
    return Path(__file__).with_name(f"{Path(__file__).stem}_{engine}.json")


def _account(outcome: Outcome) -> dict[str, float]:
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "generated_tokens_per_second": outcome.generated_tokens_per_second,
        "mean_staleness": outcome.mean_staleness,
        "seconds": outcome.rollout_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=CLOCKS, default="embedded")
    parser.add_argument("--slots", type=int, help="only the settings of engines with so many")
    parser.add_argument("--on-update", choices=["recompute", "keep"], help="only the settings of such engines")
    parser.add_argument("--log-dir", type=Path, help="where a server's log and the policy are kept")
    parser.add_argument("--layers", type=int, default=2, help="of the policy")
    parser.add_argument("--seconds", type=float, default=240.0, help="for each engine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = results_of(args.engine)
    results: dict[str, Any] = json.loads(path.read_text())["settings"] if path.exists() else {}
    for slots, on_update in dict.fromkeys((setting.slots, setting.on_update) for setting in SETTINGS):
        if args.slots in (None, slots) and args.on_update in (None, on_update):
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(measure(args, slots, on_update, results, args.log_dir or Path(folder)))
    for name, result in results.items():
        print(f"{name}: prediction off by {result['error']}")
    print(path)


if __name__ == "__main__":
    main()
