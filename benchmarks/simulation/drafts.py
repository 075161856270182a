"""A forecast by a roofline: what drafts bring Qwen3-8B on an H100 and an MI300X, by batch and context. No GPU was used.

Verifying costs what `CostModel.verification` says. Acceptance is what the embedded engine measured on the quickstart's
policy (`benchmarks/drafts.json`): drafted tokens that were drawn, as a share, at 1, 8 and 32 slots. It is taken as the
chance of each drafted token, which is cautious, since tokens behind the first refused one count there as refused. How
often there is a draft at all was not measured: every pass (coverage 1) and every second one (0.5) are computed.

    python benchmarks/simulation/drafts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from april.simulation.cost_model import CostModel
from april.simulation.drafts import best_draft, crossover
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline

MEASURED = Path(__file__).resolve().parents[1] / "drafts.json"
BATCHES, CONTEXTS, COVERAGES = (1, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512), (1000, 4000, 16000), (1.0, 0.5)


def acceptances() -> dict[str, float]:
    """Drafted tokens that were drawn, as a share, by how it was measured; with the smallest policy."""
    cells = json.loads(MEASURED.read_text())["cells"]
    smallest = min(cell["parameters"] for cell in cells)
    return {
        f"{cell['slots']} slot{'s' * (cell['slots'] > 1)}, {'partial' if cell['partial'] else 'synchronous'}": (
            cell["accepted_tokens"] / cell["drafted_tokens"]
        )
        for cell in cells
        if cell["parameters"] == smallest and cell["slots"] <= 8
    }


def forecast(cost: CostModel, acceptance: float, coverage: float) -> list[dict[str, Any]]:
    rows = []
    for context in CONTEXTS:
        held = int(min(cost.slots, cost.kv_tokens / context))
        gains = {batch: best_draft(cost, batch, context, acceptance, coverage) for batch in BATCHES if batch <= held}
        rows.append(
            {
                "context": context,
                "largest_batch_that_fits": held,
                "times_by_batch": {batch: round(gain.times, 3) for batch, gain in gains.items()},
                "drafted_by_batch": {batch: gain.drafted for batch, gain in gains.items()},
                "largest_batch_with_1.5_times": crossover(cost, context, acceptance, 1.5, coverage),
                "largest_batch_with_1.02_times": crossover(cost, context, acceptance, 1.02, coverage),
            }
        )
    return rows


def main() -> None:
    measured = acceptances()
    results = []
    for gpu in ("h100", "mi300x"):
        cost = roofline(GPUS[gpu], MODELS["qwen3-8b"], Roofline(slots=BATCHES[-1]))
        for name, acceptance in measured.items():
            for coverage in COVERAGES:
                rows = forecast(cost, acceptance, coverage)
                results.append(
                    {
                        "gpu": gpu,
                        "acceptance_of": name,
                        "acceptance": acceptance,
                        "coverage": coverage,
                        "forecast": rows,
                    }
                )
                for row in rows:
                    times = " ".join(f"{batch}: {times:.2f}" for batch, times in row["times_by_batch"].items())
                    print(
                        f"{gpu:6} accepted {acceptance:.2f}, coverage {coverage}, context {row['context']:5}  {times}"
                    )
    document = {
        "command": f"python benchmarks/simulation/{Path(__file__).name}",
        "kind": "forecast by a roofline; nothing was run on a GPU",
        "model": "qwen3-8b",
        "results": results,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
