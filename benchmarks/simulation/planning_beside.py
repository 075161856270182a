"""Cost of planning N' with short steps: automatic N' against the same N' step by step without planning.

The simulated engine runs in real time, with steps of about a quarter of a second or a tenth (--short), no training
between them and a batch of 8 prompts of 4 samples: the worst case, in which planning overlaps with generation only.
Each round runs with automatic N', then twice with the N' chosen for each step, read from a list: the same work without
planning. The difference between these two runs is the noise.

`planning` is the processor time of planning (the planning thread, and the event loop's time to learn from a step), as a
share of the steps' time.

    OMP_NUM_THREADS=1 python benchmarks/simulation/planning_beside.py
    OMP_NUM_THREADS=1 python benchmarks/simulation/planning_beside.py --short
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.rollout.admission.auto import AutoAdmission
from april.rollout.batch import Plan, RolloutBatch
from april.simulation.blank import BlankSample
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.run import scheduler_of
from april.simulation.workload import Part, Workload

STEPS, ROUNDS = 48, 3
WORKLOAD = Workload("toy", (Part(60, 0.8),), 512, rollout_batch_size=8, n_samples_per_prompt=4, prompt_tokens=20)
COST = CostModel(
    slots=48,
    kv_tokens=1_000_000,
    decode_batches=(1, 48),
    decode_seconds=(0.003, 0.004),
    prefill_token_seconds=1e-5,
)


@dataclass
class Replayed:
    """Admission that wants of each step what another one wanted of it."""

    targets: list[int]
    steps: int = 0

    def plan(self, batch_size: int) -> Plan:
        return Plan(self.targets[min(self.steps, len(self.targets) - 1)])

    def observe(self, step: RolloutBatch) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


@contextmanager
def planning() -> Iterator[list[float]]:
    """Collects the processor seconds that automatic admission takes, in whichever thread."""
    took: list[float] = []

    def timed(method: Any) -> Any:
        def call(*args: Any) -> Any:
            before = time.thread_time()
            try:
                return method(*args)
            finally:
                took.append(time.thread_time() - before)

        return call

    originals = AutoAdmission.observe, AutoAdmission._choose
    AutoAdmission.observe, AutoAdmission._choose = map(timed, originals)  # type: ignore[method-assign]
    try:
        yield took
    finally:
        AutoAdmission.observe, AutoAdmission._choose = originals  # type: ignore[method-assign]


async def collect(cost: CostModel, admission: Any) -> list[RolloutBatch]:
    engine = SimulatedEngine(cost, WORKLOAD, on_update="keep")
    steps = []
    own = {"over_sampling_batch_size": admission}
    async with scheduler_of(engine, WORKLOAD, WORKLOAD.prompts(), own, 0, sample_type=BlankSample) as scheduler:
        for _ in range(STEPS):
            steps.append(await scheduler.next_batch())
            await scheduler.update_weights()
    return steps


def figures(steps: list[RolloutBatch]) -> dict[str, Any]:
    delays = [min(span.start for span in step.request_intervals) for step in steps if step.request_intervals]
    seconds = sum(step.seconds for step in steps)
    return {
        "consumed_tokens_per_second": sum(step.consumed_tokens for step in steps) / seconds,
        "step_seconds": seconds / len(steps),
        "first_request_after_ms": 1000 * sum(delays) / len(delays),
    }


def measure(cost: CostModel) -> dict[str, Any]:
    with planning() as took:
        auto = asyncio.run(collect(cost, "auto"))
    targets = [step.target for step in auto]
    same, again = (asyncio.run(collect(cost, Replayed(targets))) for _ in range(2))
    arms = {"auto": figures(auto), "same": figures(same), "again": figures(again)}
    speed = {name: one["consumed_tokens_per_second"] for name, one in arms.items()}
    return {
        "planning": sum(took) / sum(step.seconds for step in auto),
        "ratio": speed["auto"] / speed["same"],
        "ratio_of_two_without_planning": speed["again"] / speed["same"],
        "plans": sum(step.plan.reason != before.plan.reason for before, step in itertools.pairwise(auto)),
        "targets": targets,
        **arms,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="steps of a tenth of a second")
    short = parser.parse_args().short
    seconds = tuple(one * (0.4 if short else 1.0) for one in COST.decode_seconds)
    cost = dataclasses.replace(COST, decode_seconds=seconds)
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(measure(cost))
        print({name: value for name, value in rounds[-1].items() if name != "targets"}, flush=True)
    names = ("planning", "ratio", "ratio_of_two_without_planning")
    spreads = {name: spread([one[name] for one in rounds]) for name in names}
    save(__file__, {"steps": STEPS, **spreads, "rounds": rounds}, "short" if short else "")


if __name__ == "__main__":
    main()
