"""Does planning N' hold up the engine where steps are short? Automatic N' against a fixed N' of its own last choice.

The simulated engine runs in real time, with steps of about a third of a second, no training between them and a batch of
8 prompts of 4 samples: the worst case, in which planning is beside nothing but generation. Both arms take turns; each
round compares the steps from the one on at which the automatic arm had come to its last choice.

    OMP_NUM_THREADS=1 python benchmarks/simulation/planning_beside.py
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.rollout.step import Step
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.run import scheduler_of
from april.simulation.workload import Part, Workload

STEPS, ROUNDS = 48, 5
WORKLOAD = Workload("toy", (Part(60, 0.8),), 512, rollout_batch_size=8, n_samples_per_prompt=4, prompt_tokens=20)
COST = CostModel(
    slots=48,
    kv_tokens=1_000_000,
    decode_batches=(1, 48),
    decode_seconds=(0.003, 0.004),
    prefill_token_seconds=1e-5,
)


async def collect(target: int | str) -> list[Step]:
    engine = SimulatedEngine(COST, WORKLOAD, on_update="keep")
    steps = []
    async with scheduler_of(engine, WORKLOAD, WORKLOAD.prompts(), {"over_sampling_batch_size": target}, 0) as scheduler:
        for _ in range(STEPS):
            steps.append(await scheduler.collect())
            await scheduler.update_weights()
    return steps


def figures(steps: list[Step]) -> dict[str, Any]:
    delays = [min(span.start for span in step.spans) for step in steps if step.spans]
    seconds = sum(step.seconds for step in steps)
    return {
        "consumed_tokens_per_second": sum(step.consumed_tokens for step in steps) / seconds,
        "step_seconds": seconds / len(steps),
        "first_request_after_ms": 1000 * sum(delays) / len(delays),
    }


def measure() -> dict[str, Any]:
    auto = asyncio.run(collect("auto"))
    choice = auto[-1].target
    since = next(i for i in range(STEPS) if all(step.target == choice for step in auto[i:]))
    fixed = asyncio.run(collect(choice))
    arms = {"auto": figures(auto[since:]), "fixed": figures(fixed[since:])}
    ratio = arms["auto"]["consumed_tokens_per_second"] / arms["fixed"]["consumed_tokens_per_second"]
    return {"choice": choice, "since_step": since, **arms, "ratio": ratio}


def main() -> None:
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(measure())
        print(rounds[-1], flush=True)
    save(__file__, {"steps": STEPS, "ratio": spread([one["ratio"] for one in rounds]), "rounds": rounds})


if __name__ == "__main__":
    main()
