"""The picture of the README: the same steps synchronous and with partial rollouts, slot by slot, over time.

Two schedulers collect from the quickstart's policy, on its problems, each from an embedded engine of its own with the
same number of slots. Nothing is trained, so both draw from one distribution. A row is a slot of the engine, a bar a
sample's stay in it; where a row is empty the slot was idle.

    OMP_NUM_THREADS=1 python benchmarks/timeline.py     writes docs/images/timeline.svg and timeline.json
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from record import save

from april import RolloutParams, RolloutScheduler
from april.config.reading import load_recipe
from april.engines.embedded import EmbeddedEngine
from april.rollout.batch import RolloutBatch
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.policy import load_policy, stop_tokens
from april.training.task_reward import TaskRewards

ROOT = Path(__file__).parents[1]
SLOTS, GROUPS, SAMPLES, WARM_UP, SHOWN = 24, 6, 4, 2, 3
COLOURS = {"finished": "#3b6fd4", "resumed": "#2a9d6f", "interrupted": "#e3a23c"}


async def collect(partial: bool) -> list[RolloutBatch]:
    """`SHOWN` steps behind `WARM_UP` others: partial rollouts begin with an empty buffer."""
    recipe = load_recipe(ROOT / "examples" / "gcd" / "recipe.toml")
    model, tokenizer = load_policy(recipe.model)
    task = build_task(recipe.task)
    scheduler = RolloutScheduler(
        EmbeddedEngine(model, max_num_seqs=SLOTS, context_length=recipe.engine.context_length, on_update="keep"),
        PromptStream(task, Encoder(tokenizer), seed=7),
        TaskRewards(task.scorer, tokenizer, recipe.rollout),
        RolloutParams(
            rollout_batch_size=GROUPS,
            over_sampling_batch_size=2 * GROUPS,
            n_samples_per_prompt=SAMPLES,
            partial_rollout=partial,
        ),
        sampling=recipe.sampling(stop_tokens(model, tokenizer)),
    )
    steps = []
    async with scheduler:
        for _ in range(WARM_UP + SHOWN):
            steps.append(await scheduler.next_batch())
            await scheduler.update_weights()
    return steps[WARM_UP:]


def stays(step: RolloutBatch) -> list[dict[str, Any]]:
    """Each sample's stay in a slot, in seconds from the step's start; those that never got a slot are left out."""
    return [
        {
            "start": _begin(span),
            "end": span.end,
            "kind": span.outcome if span.outcome == "interrupted" or span.before == 0 else "resumed",
        }
        for span in step.request_intervals
        if span.queued is not None
    ]


def _begin(span: Any) -> float:
    """When the slot was taken: one token's time before the first token, which is when the account knows of it."""
    tokens = max(1, span.after - span.before - span.first_tokens)
    return max(0.0, span.queued - (span.end - span.queued) / tokens)


def lanes(bars: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """A row for each bar: the lowest one that is free when it begins."""
    free: list[float] = []
    placed = []
    for bar in sorted(bars, key=lambda bar: bar["start"]):
        row = next((i for i, end in enumerate(free) if end <= bar["start"] + 1e-3), len(free))
        free[row : row + 1] = [bar["end"]]
        placed.append((row, bar))
    return placed


def draw(arms: dict[str, list[dict[str, Any]]], path: Path) -> None:
    plt.rcParams.update({"svg.hashsalt": "april", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 1, figsize=(9.6, 5.0), sharex=True, facecolor="white")
    for axis, (name, steps) in zip(axes, arms.items(), strict=True):
        origin = 0.0
        tokens = sum(step["consumed_tokens"] for step in steps)
        for number, step in enumerate(steps):
            axis.axvspan(origin, origin + step["seconds"], color="#eef0f4" if number % 2 else "#f7f8fa", lw=0)
            for row, bar in lanes(step["stays"]):
                axis.barh(
                    row, bar["end"] - bar["start"], left=origin + bar["start"], height=0.8, color=COLOURS[bar["kind"]]
                )
            origin += step["seconds"]
            axis.axvline(origin, color="#333", lw=1)
        axis.set_title(f"{name}: {tokens / origin:,.0f} consumed tokens/s", loc="left", fontsize=10, fontweight="bold")
        axis.set_ylabel(f"{SLOTS} slots")
        axis.set_yticks([])
        axis.set_ylim(SLOTS - 0.4, -0.6)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[1].set_xlabel(f"seconds; a vertical line is the end of a step of {GROUPS} groups of {SAMPLES}")
    labels = {
        "finished": "started and finished in the step",
        "interrupted": "interrupted: continues in the next step",
        "resumed": "resumed and finished",
    }
    handles = [Patch(color=COLOURS[kind], label=label) for kind, label in labels.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    arms = {}
    for name, partial in (("Synchronous", False), (f"Partial rollouts, N' = {2 * GROUPS}", True)):
        steps = asyncio.run(collect(partial))
        arms[name] = [
            {"seconds": step.seconds, "consumed_tokens": step.consumed_tokens, "stays": stays(step)} for step in steps
        ]
    draw(arms, ROOT / "docs" / "images" / "timeline.svg")
    print(save(__file__, {"slots": SLOTS, "groups": GROUPS, "samples": SAMPLES, "arms": arms}))


if __name__ == "__main__":
    main()
