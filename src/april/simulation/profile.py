"""Measuring a recipe's model without training, and forecasting the gain of partial rollouts.

Synchronous rollouts of the recipe's own prompts measure response lengths, their correlation within groups, and the
share of idle slots at the end of a step. The same engine is then calibrated, and the scheduler is simulated with these
lengths and costs at several N'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.images.kept import KeptImages
from april.reporting.trace import StepTrace, TraceWriter, decoding_start, duration, trace_of
from april.rollout.batch import RolloutBatch, rate
from april.rollout.scheduler import RolloutScheduler
from april.simulation.calibration import Calibration
from april.simulation.cluster import Cluster
from april.simulation.cost_model import CostModel
from april.simulation.idle_engine import IdleEngine, idle_engine
from april.simulation.plan import Point, explore, recommended
from april.simulation.recorded import read_recorded
from april.simulation.run import no_reward
from april.simulation.turns import Turns
from april.simulation.workload import Workload
from april.tasks.build import build_task, in_recipe
from april.tasks.task import Task

LAST = 0.1
"""Share of a step's samples that form its tail."""
WORTH = 0.05
"""Smallest gain that justifies older data."""
FULL = 0.9
"""Share of decoding slots that leaves little to gain."""
ALIKE = 1.5
"""Ratio of the 99th percentile of the lengths to their median below which lengths hardly vary."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The tail of a synchronous step: the time after all but `LAST` of its samples have finished.

    Args:
        step_seconds: seconds of a whole step.
        share: share of the step's time.
        occupancy: share of the slots that decode in the tail.
        step_occupancy: share of the slots that decode in the whole step.
    """

    step_seconds: float
    share: float
    occupancy: float
    step_occupancy: float

    @classmethod
    def of(cls, steps: Sequence[StepTrace]) -> Tail:
        """Return the mean over steps."""
        rows = np.array([_tail(step) for step in steps])
        seconds, tail, busy_tail, busy = rows.sum(axis=0).tolist()
        slots = steps[0]["slots"]
        return cls(
            step_seconds=seconds / len(rows),
            share=rate(tail, seconds),
            occupancy=rate(busy_tail, tail * slots),
            step_occupancy=rate(busy, seconds * slots),
        )


def _tail(step: StepTrace) -> tuple[float, float, float, float]:
    """Return seconds of the step and of its tail, and slot-seconds used in the tail and in the whole step."""
    spans = [span for span in step["spans"] if span["queued"] is not None]
    # A sample has a span for each request; in this order its last end remains.
    last = {span["sample"]: span["end"] for span in sorted(spans, key=lambda span: span["end"])}
    ends = np.sort(list(last.values()))
    seconds, begins = duration(step), float(ends[int(np.ceil((1 - LAST) * len(ends))) - 1])
    starts = [decoding_start(span) for span in spans]
    in_tail = sum(max(0.0, span["end"] - max(start, begins)) for span, start in zip(spans, starts, strict=True))
    busy = sum(span["end"] - start for span, start in zip(spans, starts, strict=True))
    return seconds, seconds - begins, in_tail, busy


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Results of profiling a recipe.

    Args:
        workload: observed lengths, ascending, and their correlation within groups.
        truncated: for each length, whether the budget truncated it, shape [responses].
        tail: tail of the synchronous steps.
        consumed_tokens_per_second: measured rate of the synchronous steps.
        cost: measured costs of the engine.
        points: simulated settings, synchronous first.
        turns: turns of episodes; None if the recipe has no environment.
    """

    workload: Workload
    truncated: NDArray[np.bool_]
    tail: Tail
    consumed_tokens_per_second: float
    cost: CostModel
    points: list[Point]
    turns: Turns | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array(self.workload.observed)

    @property
    def spread(self) -> float:
        """Ratio of the 99th percentile of the lengths to their median."""
        return float(np.percentile(self.lengths, 99) / np.median(self.lengths))

    @property
    def chosen(self) -> Point:
        return recommended(self.points)

    @property
    def gain(self) -> float:
        """Ratio of expected consumed tokens/s of the recommended setting to synchronous rollouts."""
        return rate(self.chosen.consumed_tokens_per_second, self.points[0].consumed_tokens_per_second)

    @property
    def simulation_error(self) -> float:
        """Relative error of the simulated synchronous rate, against the measured one."""
        return rate(self.points[0].consumed_tokens_per_second, self.consumed_tokens_per_second) - 1

    @property
    def worth_it(self) -> bool:
        return self.gain >= 1 + WORTH

    @property
    def verdict(self) -> str:
        """Return in one or two sentences whether partial rollouts are worth it, and why."""
        if self.worth_it:
            return (
                f"Worth it: {self.chosen.name} is expected to bring {self.gain:.2f} times the consumed tokens/s of "
                f"synchronous rollouts, at a mean staleness of {self.chosen.mean_staleness:.2f}."
            )
        return f"Not worth it: {self.gain - 1:+.0%} consumed tokens/s is the gain to expect. {self._why_not}"

    @property
    def _why_not(self) -> str:
        cut = float(self.truncated.mean())
        if cut > LAST:
            return f"{cut:.0%} of the responses reach the budget, so the longest responses all have the same length."
        if self.spread < ALIKE:
            return f"The lengths hardly vary: the 99th percentile is {self.spread:.2f} times the median."
        if self.tail.step_occupancy >= FULL:
            return f"In a synchronous step {self.tail.step_occupancy:.0%} of the slots already decode."
        return "With fewer samples the engine's decode steps are so much shorter that empty slots cost little."

    def to_dict(self) -> dict[str, Any]:
        lengths = self.lengths
        return {
            "verdict": self.verdict,
            "worth_it": self.worth_it,
            "gain": self.gain,
            "lengths": {
                "responses": len(lengths),
                "mean": float(lengths.mean()),
                **{f"p{p}": float(np.percentile(lengths, p)) for p in (10, 50, 90, 99)},
                "max": int(lengths.max()),
                "truncated_share": float(self.truncated.mean()),
                "correlation_within_groups": self.workload.correlation,
            },
            "turns": None if self.turns is None else asdict(self.turns),
            "tail": vars(self.tail),
            "measured_consumed_tokens_per_second": self.consumed_tokens_per_second,
            "simulated_off_by": self.simulation_error,
            "recommended": self.chosen.to_dict(),
            "settings": [point.to_dict() for point in self.points],
        }


def profile(
    recipe: Recipe,
    output: Path,
    steps: int,
    simulated: int,
    on_status: Callable[[str], None],
) -> Profile:
    """Profile a checked recipe, and write trace.jsonl, recipe.json and cost_model.json for `april simulate`.

    Args:
        output: existing directory.
        steps: synchronous steps of rollouts without training.
        simulated: simulated steps of each setting.
        on_status: called with the current activity.

    Raises:
        ConfigError: the recipe does not fit its task or its model.
        EngineError: the engine failed.
    """
    try:
        task = build_task(recipe.task)
    except ValueError as error:
        raise ConfigError(in_recipe(error)) from None
    found, calibration, slots = asyncio.run(_measure(recipe, task, steps, on_status))
    on_status("fitting the engine's costs")
    cost = calibration.fit(f"measured: {recipe.engine.engine}, {recipe.model.path}")
    cost.save(output / "cost_model.json")
    (output / "recipe.json").write_text(json.dumps(recipe.redacted(), indent=2))
    traces = _write(output, found, slots)
    workload = read_recorded(output).workload
    prompts = [len(group.prompt.token_ids) for step in found for group in step.groups]
    workload = replace(workload, prompt_tokens=max(int(np.median(prompts)), 1))
    turns = Turns.seen([sample for step in found for group in step.groups for sample in group.samples])
    points = []
    cluster = Cluster(name=recipe.engine.engine, engines=1, cost=cost)
    for point in explore(recipe, workload, cluster, simulated, simulated // 4, turns):
        points.append(point)
        on_status(f"simulated: {point.name}, {point.consumed_tokens_per_second:,.0f} consumed tokens/s")
    timed = found[1:] or found  # the first step loads kernels and caches
    # `workload.observed` is sorted by length; flags of truncation get the same order.
    order = np.argsort(np.concatenate([step["lengths"] for step in traces]), kind="stable")
    return Profile(
        workload=workload,
        truncated=np.concatenate([step["truncated"] for step in traces])[order],
        tail=Tail.of(traces[1:] or traces),
        consumed_tokens_per_second=rate(
            sum(step.consumed_tokens for step in timed), sum(step.seconds for step in timed)
        ),
        cost=cost,
        points=points,
        turns=turns,
    )


def _write(output: Path, steps: Sequence[RolloutBatch], slots: int) -> list[StepTrace]:
    (output / "trace.jsonl").unlink(missing_ok=True)
    traces = [trace_of(number, step, slots) for number, step in enumerate(steps, 1)]
    with TraceWriter(output) as writer:
        for trace in traces:
            writer.write(trace)
    return [StepTrace(**trace) for trace in traces]  # type: ignore[typeddict-item]


async def _measure(
    recipe: Recipe, task: Task, steps: int, on_status: Callable[[str], None]
) -> tuple[list[RolloutBatch], Calibration, int]:
    on_status("loading the policy and starting the engine")
    async with idle_engine(recipe) as idle:
        found = []
        with _rollouts(recipe, task, idle) as rollouts:
            async with rollouts:
                await rollouts.update_weights(version=rollouts.engine_version)
                for number in range(1, steps + 1):
                    on_status(f"synchronous step {number} of {steps}")
                    found.append(await rollouts.next_batch())
        idle.engine.forget()
        longest = max(int(max(sample.length for step in found for group in step.groups for sample in group.samples)), 8)
        calibration = await idle.calibrate(min(longest, 512), 1, on_status)
        return found, calibration, idle.engine.capacity.slots


def _episodes(environment: Any, context: int, kept: KeptImages) -> AbstractContextManager[Any]:
    """Open the episodes of an environment."""
    found: AbstractContextManager[Any] = environment.episodes(context, kept) if environment else nullcontext()
    return found


@contextmanager
def _rollouts(recipe: Recipe, task: Task, idle: IdleEngine) -> Iterator[RolloutScheduler]:
    """Yield a scheduler for synchronous steps on the recipe's prompts, without rewards."""
    from april.rendering.conversation import decoder
    from april.training.build import build_environment, build_prompts
    from april.training.context import room_for_prompt
    from april.training.policy import stop_tokens
    from april.training.program_setup import ProgramSetup

    context = idle.engine.capacity.context_length
    room = room_for_prompt(recipe.rollout.max_response_length, context)
    limit, stops = min(recipe.rollout.max_prompt_length or room, room), stop_tokens(idle.model, idle.tokenizer)
    environment = build_environment(recipe, idle.tokenizer, stops, idle.images)
    prompts = build_prompts(recipe, task, idle.tokenizer, environment, idle.images).to_train_on(limit)
    if isinstance(environment, ProgramSetup):
        raise ConfigError("environment: april profile measures environments of reset and step, and no programs")
    kept = KeptImages(Path(idle.recipe.reporting.output), idle.images)
    with _episodes(environment, context, kept) as episodes:
        yield RolloutScheduler(
            idle.engine,
            prompts,
            no_reward,
            recipe.rollout_params(partial_rollout=False),
            sampling=recipe.sampling(stops),
            faults=recipe.fault_settings(),
            reward_scope="group",
            seed=recipe.training.seed,
            episodes=episodes,
            decode=decoder(idle.tokenizer) if recipe.rollout.stop else None,
        )
