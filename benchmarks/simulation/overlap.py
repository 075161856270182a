"""Throughput with overlap of generation and training, in virtual time.

Engines and trainer have devices of their own. Both arms are the same april with the same engines, bound and N': one
alternates (no generation during training), one overlaps (`overlap=True`). The trainer takes 0.25, 0.5 and 1
times as long as a synchronous rollout; the aims are 1.35, 1.5 and 1.35 times the consumed tokens/s over everything.

    python benchmarks/simulation/overlap.py
    python benchmarks/simulation/overlap.py --settings "N' automatic, bound 5" --variant auto    # overlap_auto.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from april.simulation.cost_model import CostModel
from april.simulation.run import Outcome, simulate
from april.simulation.workload import Part, Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save, spread

WORKLOAD = Workload("reasoning", (Part(1800, 0.9),), max_tokens=16384, rollout_batch_size=32, n_samples_per_prompt=8)
COST = CostModel(
    slots=64,
    kv_tokens=400_000,
    decode_batches=(1, 64),
    decode_seconds=(0.009, 0.016),
    kv_token_seconds=2e-8,
    prefill_token_seconds=4e-5,
    update_seconds=3.0,
    interrupt_seconds=0.2,
)
AIMS = {0.25: 1.35, 0.5: 1.5, 1.0: 1.35}
SETTINGS: dict[str, dict[str, Any]] = {
    "N' = 1.25 N, bound 2": {"over_sampling_batch_size": 40, "max_staleness": 2},
    "N' = 2 N, bound 3": {"over_sampling_batch_size": 64, "max_staleness": 3},
    "N' automatic, bound 5": {"over_sampling_batch_size": "auto", "max_staleness": 5},
}


def figures(outcome: Outcome) -> dict[str, float]:
    return {
        "consumed_tokens_per_second": outcome.overall_tokens_per_second,
        "step_seconds": outcome.seconds / len(outcome.counted),
        "over_sampling_batch_size": sum(step.target for step in outcome.counted) / len(outcome.counted),
        "mean_staleness": outcome.mean_staleness,
        "max_staleness": outcome.max_staleness,
        "off_policy_token_share": outcome.off_policy_token_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--on-update", nargs="+", choices=["keep", "recompute"], default=["keep", "recompute"])
    parser.add_argument("--variant", default="", help="of the file that the figures go to")
    options = parser.parse_args()
    lasting = {"replicas": options.replicas, "steps": options.steps, "warm_up": options.warm_up}
    synchronous = simulate(WORKLOAD, COST, partial_rollout=False, **lasting)
    per_token = synchronous.rollout_seconds / sum(step.consumed_tokens for step in synchronous.counted)
    results: list[dict[str, Any]] = []
    for share, aim in AIMS.items():
        for on_update in options.on_update:
            for name, params in ((name, SETTINGS[name]) for name in options.settings):
                arms: dict[str, list[dict[str, float]]] = {"alternating": [], "overlapping": []}
                for seed in range(options.seeds):
                    for arm, runs in arms.items():
                        outcome = simulate(
                            WORKLOAD,
                            COST,
                            on_update=on_update,
                            train_token_seconds=share * per_token,
                            overlap=arm == "overlapping",
                            seed=seed,
                            **lasting,
                            **params,
                        )
                        assert outcome.max_staleness <= params["max_staleness"]
                        runs.append(figures(outcome))
                gains = [
                    after["consumed_tokens_per_second"] / before["consumed_tokens_per_second"]
                    for before, after in zip(arms["alternating"], arms["overlapping"], strict=True)
                ]
                results.append(
                    {
                        "training_time_of_rollout": share,
                        "aim": aim,
                        "on_update": on_update,
                        "setting": name,
                        "gain": spread(gains),
                        **arms,
                    }
                )
                stale = [runs[0]["mean_staleness"] for runs in arms.values()]
                print(
                    f"trainer {share:4.2f} of a rollout, {on_update:9}, {name:22}: "
                    f"{results[-1]['gain']['median']:.2f} times, staleness {stale[0]:.2f} and {stale[1]:.2f}",
                    flush=True,
                )
    found = {"synchronous_rollout": figures(synchronous), "workload": WORKLOAD.name, "results": results}
    path = save(__file__, found, options.variant)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
