"""Share of engine time in which resumed samples are prefilled again, in virtual time, and the gain of remedies.

Engines on 4 H100s by roofline: Qwen3-8B on one GPU each, Qwen3-30B-A3B on two each; the trainer takes no room on them.
Responses up to 16k, 32k and 64k tokens, lognormal, with a median of a sixteenth of the budget (`scaled`), or of 1,024
tokens with a heavier tail, so that only the tail grows with the budget (`tail`). Training is left out.

Arms, for each model, budget and setting of N' and staleness bound:

- `recompute`: an update drops the KV cache, so that resumed samples are prefilled: prompt and response so far;
- `no prefix cache`: as `recompute`, and the samples of a group do not share their prompt either. A cached prefix serves
  within one version only, and april interrupts a sample at an update, so nothing else is shared within a version;
- `late`: as `recompute`, and engines decode on for a tenth of a step's time after the batch is complete, so that
  samples that are about to finish do;
- `keep`: the KV cache outlives the update, and samples are interrupted all the same;
- `keep, no abort`: as `keep`, and an interrupt takes no time;
- `keep, offload`: as `keep`, and the KV cache of unfinished samples moves to host memory and back over each update, at
  `LINK` bytes/s each way for each GPU, all of it while the engine waits.

    python benchmarks/simulation/reprefill.py
    python benchmarks/simulation/reprefill.py --shape tail
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from april.rollout.engine import Chunk, KVPolicy
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import Outcome, simulate
from april.simulation.workload import Part, Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save, spread

BUDGETS = 16384, 32768, 65536
N, GROUP = 32, 8
GPU_COUNT, SLOTS = 4, 64
"""Slots of each GPU."""
ENGINE_GPUS = {"qwen3-8b": 1, "qwen3-30b-a3b": 2}
LINK = 2.5e10
"""Half of PCIe 5.0 x16."""
LATE = 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "2 N": {"over_sampling_batch_size": 2 * N, "max_staleness": 5},
    "bound 1": {"over_sampling_batch_size": 2 * N, "max_staleness": 1},
    "default": {"over_sampling_batch_size": "auto", "max_staleness": 5},
    "1.25 N": {"over_sampling_batch_size": 5 * N // 4, "max_staleness": 5},
    "no bound": {"over_sampling_batch_size": 2 * N, "max_staleness": None, "first_come": True},
}

EVERY_ARM = ("2 N",)
"""Settings in which every arm runs; the others have `recompute` and `keep`."""


@dataclass(frozen=True)
class Arm:
    on_update: KVPolicy = "recompute"
    prefix_caching: bool = True
    late: bool = False
    abort: bool = True
    offload: bool = False


ARMS = {
    "recompute": Arm(),
    "no prefix cache": Arm(prefix_caching=False),
    "late": Arm(late=True),
    "keep": Arm("keep"),
    "keep, no abort": Arm("keep", abort=False),
    "keep, offload": Arm("keep", offload=True),
}


def engine_type(late_seconds: float, moved_token_seconds: float) -> type[SimulatedEngine]:
    """Return a class of engines that interrupt late, and move KV caches over an update."""

    class Engine(SimulatedEngine):
        async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
            if late_seconds and self._in_flight:
                await asyncio.sleep(late_seconds)
            return await super().interrupt(sample_ids)

        async def update_weights(self, version: int, weights: Any = None) -> None:
            if moved_token_seconds:
                held: Counter[int] = Counter()
                for replica, tokens in self.replicas.caches.values():
                    held[replica] += tokens
                await asyncio.sleep(2 * max(held.values(), default=0) * moved_token_seconds)
            await super().update_weights(version, weights)

    return Engine


def workload(shape: str, budget: int) -> Workload:
    part = Part(budget // 16, 0.9) if shape == "scaled" else Part(1024, 1.5)
    return Workload(f"{shape}, {budget}", (part,), max_tokens=budget, rollout_batch_size=N, n_samples_per_prompt=GROUP)


def figures(outcome: Outcome, engines: int) -> dict[str, float]:
    engine_seconds = engines * sum(step.seconds + step.update_seconds for step in outcome.steps)
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "step_seconds": outcome.rollout_seconds / len(outcome.counted),
        "prefill_share": outcome.prefill_seconds / engine_seconds,
        "resumed_prefill_share": outcome.resumed_prefill_seconds / engine_seconds,
        "update_share": sum(step.update_seconds for step in outcome.counted) / outcome.rollout_seconds,
        "prefilled_per_consumed_token": outcome.prefilled_tokens / sum(step.consumed_tokens for step in outcome.steps),
        "target": sum(step.target for step in outcome.counted) / len(outcome.counted),
        "mean_staleness": outcome.mean_staleness,
        "max_staleness": outcome.max_staleness,
        "preemptions": outcome.preemptions,
        "longest": int(outcome.lengths.max()),
    }


def run(
    arm: Arm,
    setting: dict[str, Any],
    lengths: Workload,
    cost: CostModel,
    model: str,
    late_seconds: float,
    seed: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    engine_gpus = ENGINE_GPUS[model]
    engines = GPU_COUNT // engine_gpus
    cost = replace(cost, prefix_caching=arm.prefix_caching)
    cost = cost if arm.abort else replace(cost, interrupt_seconds=0.0)
    moved = MODELS[model].kv_bytes / (LINK * engine_gpus) if arm.offload else 0.0
    outcome = simulate(
        lengths,
        cost,
        replicas=engines,
        steps=options.steps,
        warm_up=options.warm_up,
        on_update=arm.on_update,
        resolution=0.2,
        engine_type=engine_type(late_seconds if arm.late else 0.0, moved),
        seed=seed,
        **setting,
    )
    return figures(outcome, engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shape", choices=("scaled", "tail"), default="scaled")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    shape: str = options.shape
    settings = SETTINGS if shape == "scaled" else ("no bound", "2 N")
    for setting, model, budget in itertools.product(settings, ENGINE_GPUS, BUDGETS):
        gpus = ENGINE_GPUS[model]
        cost = roofline(GPUS["h100"].times(gpus), MODELS[model], Roofline(slots=SLOTS * gpus))
        whole = {"lengths": workload(shape, budget), "cost": cost, "model": model, "options": options}
        chosen, late, runs = SETTINGS[setting], [0.0] * options.seeds, {}
        arms = ARMS if shape == "scaled" and setting in EVERY_ARM else ("recompute", "keep")
        for name in arms:
            runs[name] = [run(ARMS[name], chosen, late_seconds=late[i], seed=i, **whole) for i in range(options.seeds)]
            if name == "recompute":
                late = [LATE * each["step_seconds"] for each in runs[name]]
        made: dict[str, Any] = {"shape": shape, "model": model, "budget": budget, "setting": setting, "arms": {}}
        for name, each in runs.items():
            over = zip(each, runs["recompute"], strict=True)
            rates = [ours["consumed_tokens_per_second"] / again["consumed_tokens_per_second"] for ours, again in over]
            made["arms"][name] = {figure: spread([one[figure] for one in each]) for figure in each[0]}
            made["arms"][name]["over_recompute"] = spread(rates)
        results.append(made)
        shares = {
            name: [round(100 * a["resumed_prefill_share"]["median"], 2), round(a["over_recompute"]["median"], 3)]
            for name, a in made["arms"].items()
        }
        print(shape, model, budget, setting, json.dumps(shares), flush=True)
        about = {"gpu": "h100", "gpus": GPU_COUNT, "slots_per_gpu": SLOTS, "link": LINK, "N": N, "G": GROUP}
        save(
            __file__,
            {**about, "steps": options.steps, "warm_up": options.warm_up, "results": results},
            "" if shape == "scaled" else shape,
        )


if __name__ == "__main__":
    main()
