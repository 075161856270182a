"""Orders of resuming, and recompute against keep, on a real engine: the embedded one, with a small random policy.

Each round runs every arm once on the same samples with the same lengths, the arms in turn, so that a machine whose
speed drifts slows all of them; what counts is the ratio to the first arm of the same round. CPU time of the process,
which runs on one thread. A call adds rounds to those that the JSON file holds.

    OMP_NUM_THREADS=1 python benchmarks/simulation/order_and_keep.py --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from predicted_vs_measured import CONTEXT, LOGNORMAL, VOCABULARY, policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.engines.embedded import EmbeddedEngine
from april.rollout.engine import KVPolicy
from april.rollout.order import ORDERS
from april.simulation.measurement import serve

SLOTS, TARGET = 32, 24
ARMS: list[tuple[str, KVPolicy]] = [("oldest", "recompute"), *((order, "keep") for order in ORDERS)]


async def once(order: str, on_update: KVPolicy, args: argparse.Namespace) -> dict[str, float]:
    engine = EmbeddedEngine(policy(args.layers), max_num_seqs=SLOTS, context_length=CONTEXT, on_update=on_update)
    outcome = await serve(
        engine,
        LOGNORMAL,
        engine.update_weights,
        steps=args.steps,
        warm_up=args.warm_up,
        vocabulary=VOCABULARY,
        clock=time.process_time,
        over_sampling_batch_size=TARGET,
        order=order,
    )
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "mean_staleness": outcome.mean_staleness,
        "max_staleness": outcome.max_staleness,
        "off_policy_token_share": outcome.off_policy_token_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2, help="of the policy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).with_suffix(".json")
    rounds: dict[str, list[dict[str, float]]] = json.loads(path.read_text())["rounds"] if path.exists() else {}
    for _ in range(args.rounds):
        for order, on_update in ARMS:
            rounds.setdefault(f"{order}, {on_update}", []).append(asyncio.run(once(order, on_update, args)))
        reference = [run["consumed_tokens_per_second"] for run in next(iter(rounds.values()))]
        arms: dict[str, Any] = {}
        for name, runs in rounds.items():
            rates = [run["consumed_tokens_per_second"] for run in runs]
            arms[name] = {
                "consumed_tokens_per_second": spread(rates),
                "ratio_to_the_first": spread([rate / other for rate, other in zip(rates, reference, strict=True)]),
                **{key: runs[0][key] for key in runs[0] if key != "consumed_tokens_per_second"},
            }
        setting = {"N": LOGNORMAL.rollout_batch_size, "N'": TARGET, "slots": SLOTS, "lengths": str(LOGNORMAL.parts)}
        command = "python benchmarks/simulation/order_and_keep.py"
        save(__file__, {"command": command, "setting": setting, "arms": arms, "rounds": rounds})
    for name, arm in arms.items():
        print(name, arm)


if __name__ == "__main__":
    main()
