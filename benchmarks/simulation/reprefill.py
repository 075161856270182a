"""Share of engine time in which resumed samples are prefilled again, in virtual time.

Qwen3-8B on 8 H100s by roofline, an engine on each GPU; responses up to 16k, 32k and 64k tokens, lognormal, with a
median of a sixteenth of the budget. Training is left out. Arms, for each budget:

- `recompute`: an update drops the KV cache, so that resumed samples are prefilled: prompt and response so far;
- `keep`: the KV cache outlives the update, so that only prompts, and samples that were preempted, are prefilled. The
  difference to `recompute` is the most that any treatment of the KV cache gains, such as its transfer to host memory
  and back over an update.

N' = 1.25 N interrupts fewer samples, and later ones, than N' = 2 N.

    python benchmarks/simulation/reprefill.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from april.simulation.cluster import gpu_cluster
from april.simulation.hardware import GPUS, MODELS
from april.simulation.run import Outcome, simulate
from april.simulation.workload import Part, Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save, spread

BUDGETS = 16384, 32768, 65536
RATIOS = 1.25, 1.5, 2.0, 3.0
N, GROUP = 64, 8
SIGMA = 0.9
SLOTS, GPU_COUNT = 64, 8
MAX_STALENESS = 5


def workload(budget: int) -> Workload:
    return Workload(
        f"lognormal, {budget}",
        (Part(budget // 16, SIGMA),),
        max_tokens=budget,
        rollout_batch_size=N,
        n_samples_per_prompt=GROUP,
    )


def figures(outcome: Outcome) -> dict[str, float]:
    engine_seconds = GPU_COUNT * sum(step.seconds for step in outcome.steps)
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "prefill_share": outcome.prefill_seconds / engine_seconds,
        "prefilled_per_consumed_token": outcome.prefilled_tokens / sum(step.consumed_tokens for step in outcome.steps),
        "mean_staleness": outcome.mean_staleness,
        "preemptions": outcome.preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    cost = gpu_cluster(GPUS["h100"], MODELS["qwen3-8b"], GPU_COUNT, slots=SLOTS).cost
    results: list[dict[str, Any]] = []
    for budget in BUDGETS:
        for ratio in (1.0, *RATIOS):
            arms: tuple[Literal["recompute", "keep"], ...] = ("recompute", "keep") if ratio > 1 else ("recompute",)
            runs = {
                arm: [
                    figures(
                        simulate(
                            workload(budget),
                            cost,
                            replicas=GPU_COUNT,
                            steps=options.steps,
                            warm_up=options.warm_up,
                            on_update=arm,
                            seed=seed,
                            over_sampling_batch_size=round(ratio * N),
                            max_staleness=MAX_STALENESS,
                        )
                    )
                    for seed in range(options.seeds)
                ]
                for arm in arms
            }
            made: dict[str, Any] = {
                "budget": budget,
                "ratio": ratio,
                **{arm: {name: spread([r[name] for r in each]) for name in each[0]} for arm, each in runs.items()},
            }
            if "keep" in runs:
                pairs = zip(runs["keep"], runs["recompute"], strict=True)
                rate = "consumed_tokens_per_second"
                made["keep_over_recompute"] = spread([kept[rate] / again[rate] for kept, again in pairs])
            results.append(made)
            medians = {name: round(f["median"], 3) for name, f in made["recompute"].items()}
            print(budget, ratio, medians, made.get("keep_over_recompute", {}).get("median"), flush=True)
            settings = {"model": "qwen3-8b", "gpu": "h100", "gpus": GPU_COUNT, "slots": SLOTS, "cost": cost.source}
            save(__file__, {**settings, "N": N, "G": GROUP, "sigma": SIGMA, "results": results})


if __name__ == "__main__":
    main()
