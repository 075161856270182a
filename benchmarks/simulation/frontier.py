"""Draw docs/images/frontier.png from against_paper.json: consumed tokens/s against mean staleness, by workload.

python benchmarks/simulation/frontier.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
OUTPUT = HERE.parent.parent / "docs" / "images" / "frontier.png"


def main() -> None:
    results = json.loads((HERE / "against_paper.json").read_text())["results"]
    rows = -(-len(results) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(13, 0.6 + 2.8 * rows), sharex=True, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (name, found) in zip(axes.flat, results.items(), strict=False):
        arms, ceiling = found["arms"], found["ceiling"]

        def line(names: list[str], arms: dict = arms, ceiling: float = ceiling) -> tuple[list[float], list[float]]:
            chosen = [arms[arm] for arm in names]
            rates = [100 * arm["consumed_tokens_per_second"] / ceiling for arm in chosen]
            return [arm["mean_staleness"] for arm in chosen], rates

        ratios = ("1.5", "2", "3")
        ours = line(["synchronous", *(f"ours {r}, keep, oldest" for r in ratios)])
        axis.plot(
            *line(["synchronous", *(f"paper {r}" for r in ratios)]), "s--", color="#b45309", label="reference's policy"
        )
        axis.plot(*ours, "o-", color="#1d4ed8", label="april, KV kept, N' fixed")
        axis.plot(*line(["ours auto, keep, oldest"]), "*", color="#15803d", markersize=14, label="april, N' automatic")
        axis.axhline(100, color="grey", linewidth=0.8)
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, 105)
        axis.grid(alpha=0.25)
    for axis in axes[-1]:
        axis.set_xlabel("mean staleness, in weight updates")
    for axis in axes[:, 0]:
        axis.set_ylabel("consumed tokens/s,\n% of the engine's ceiling")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, dpi=110)
    print(OUTPUT)


if __name__ == "__main__":
    main()
