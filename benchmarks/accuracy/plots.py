"""The plots of the accuracy study: learning curves of both arms, and final accuracy by staleness and correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from analysis import ACCURACY, SAMPLES, final_accuracy, gcd_grpo, pairs_of, targets_of
from study import ALGORITHMS, BOUNDS, CORRECTIONS, TASKS

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "april", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)

from matplotlib import pyplot  # noqa: E402

ARMS = {"synchronous": "#3b6fb6", "partial": "#d9772b"}
COLOURS = dict(zip(CORRECTIONS, ("#888888", "#3b6fb6", "#7b5ea7", "#d9772b", "#3a9a6b"), strict=True))

Record = Mapping[str, Any]


def draw(records: Sequence[Record], directory: Path) -> None:
    """Write `learning.svg` and `staleness.svg`."""
    for name, plot in (("learning", learning), ("staleness", staleness)):
        figure = plot(records)
        figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def learning(records: Sequence[Record]) -> Any:
    """Held-out accuracy against samples: mean over the seeds that both arms ran, band from the least to the most."""
    pairs = pairs_of(records)
    targets = targets_of(pairs)
    evaluations = max((len(r["evaluations"]) for of in pairs.values() for pair in of for r in pair), default=0)
    figure, axes = pyplot.subplots(len(ALGORITHMS), len(TASKS), figsize=(9, 7.2), sharex=True, sharey="col")
    for row, algorithm in zip(axes, ALGORITHMS, strict=True):
        for axis, task in zip(row, TASKS, strict=True):
            axis.set_title(f"{task}, {algorithm.upper()}", fontsize=9, loc="left")
            if task in targets:
                axis.axhline(targets[task], color="#999999", linewidth=0.8, linestyle=":")
            for index, (arm, colour) in enumerate(ARMS.items()):
                runs = [pair[index]["evaluations"] for pair in pairs.get((task, algorithm), [])]
                runs = [run for run in runs if len(run) == evaluations]
                if not runs:
                    continue
                samples, accuracy = (np.array(runs)[:, :, column] for column in (SAMPLES, ACCURACY))
                x = samples.mean(axis=0)
                axis.fill_between(x, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.15, linewidth=0)
                axis.plot(
                    x, accuracy.mean(axis=0), color=colour, marker="o", markersize=3, label=f"{arm} ({len(runs)})"
                )
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False, fontsize=8, loc="lower right")
            axis.grid(axis="y", color="#eeeeee")
    for axis in axes[-1]:
        axis.set_xlabel("samples")
    for row in axes:
        row[0].set_ylabel("held-out accuracy")
    figure.suptitle("Mean over seeds (their number in brackets), band: least to most; dotted: the target", fontsize=9)
    figure.tight_layout()
    return figure


def staleness(records: Sequence[Record]) -> Any:
    """Final accuracy against N'/N, a panel for each bound, a line for each correction."""
    runs = gcd_grpo(records)
    synchronous = [final_accuracy(r) for r in runs if r["over_sampling"] == 1]
    bounds = [bound for bound in BOUNDS if any(r["max_staleness"] == bound for r in runs)]
    figure, axes = pyplot.subplots(1, len(bounds), figsize=(1 + 3 * len(bounds), 3.6), sharey=True, squeeze=False)
    for axis, bound in zip(axes[0], bounds, strict=True):
        axis.set_title("no bound" if bound is None else f"staleness at most {bound}", fontsize=9, loc="left")
        if synchronous:
            axis.axhspan(min(synchronous), max(synchronous), color="#000000", alpha=0.07, linewidth=0)
            axis.axhline(np.mean(synchronous), color="#000000", linewidth=0.8, linestyle=":", label="synchronous")
        for shift, (correction, colour) in enumerate(COLOURS.items()):
            own: dict[float, list[float]] = {}
            for r in runs:
                if (r["max_staleness"], r["correction"]) == (bound, correction) and r["over_sampling"] > 1:
                    own.setdefault(r["over_sampling"], []).append(final_accuracy(r))
            if not own:
                continue
            x = np.array(sorted(own))
            means = np.array([np.mean(own[at]) for at in x])
            errors = [means - [min(own[at]) for at in x], [max(own[at]) for at in x] - means]
            moved = x + 0.05 * (shift - 2)
            axis.errorbar(
                moved, means, errors, color=colour, marker="o", markersize=3.5, linewidth=1.2, label=correction
            )
        axis.set_xlabel("N'/N")
        axis.set_xticks([1.5, 2, 3, 4])
        axis.set_xlim(1.3, 4.2)
        axis.grid(axis="y", color="#eeeeee")
    axes[0, 0].set_ylabel("final held-out accuracy")
    handles, labels = axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=6 if len(bounds) > 2 else 3, loc="lower center", fontsize=9)
    figure.suptitle("gcd, GRPO: mean over seeds, bars and grey band from the least to the most", fontsize=9)
    figure.tight_layout(rect=(0, 0.08 if len(bounds) > 2 else 0.15, 1, 1))
    return figure


def trade(arms: Mapping[str, Mapping[str, Any]]) -> Any:
    """Final accuracy against seconds, both relative to synchronous runs: a panel each for the CPU's seconds and for the
    accelerator's, a line each for stale and for redrafted tokens, a point for each N'."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    panels = {"cpu_seconds": "CPU seconds of the run", "accelerator_seconds": "accelerator's seconds of rollouts"}
    lines = {"partial": ("stale tokens corrected", "#d9772b"), "redraft": ("redrafted", "#3a9a6b")}
    for axis, (measure, title) in zip(axes, panels.items(), strict=True):
        axis.set_title(f"{title}, of synchronous", fontsize=9, loc="left")
        axis.axhline(0, color="#999999", linewidth=0.8, linestyle=":")
        axis.plot([1], [0], color=ARMS["synchronous"], marker="s", label="synchronous")
        for prefix, (label, colour) in lines.items():
            chosen = [arm for arm in arms if arm.startswith(prefix) and not arm.endswith("longer")]
            x = [arms[arm][measure]["mean"] for arm in chosen]
            found = [arms[arm]["minus_synchronous"] for arm in chosen]
            y = np.array([each["mean"] for each in found])
            ends = np.abs([[each["low"], each["high"]] for each in found] - y[:, None]).T
            axis.errorbar(x, y, ends, color=colour, marker="o", markersize=4, capsize=2, linewidth=1, label=label)
            for arm, at, height in zip(chosen, x, y, strict=True):
                axis.annotate(f"{arm.split('-')[1]} N", (at, height), (3, 4), textcoords="offset points", fontsize=7)
        axis.grid(axis="y", color="#eeeeee")
        axis.set_xlim(0, 1.08)
    axes[0].set_ylabel("final accuracy minus synchronous")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure
