"""Learning curves of a policy trained by two processes and by one: the quickstart's recipe, same seed.

    python benchmarks/processes.py [--runs DIR]

Runs are kept in DIR, and existing runs are used as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import save

ROOT = Path(__file__).parents[1]
RECIPE = "examples/gcd/recipe.toml"
COUNTS = (1, 2)


def trained(run: Path, processes: int) -> dict[str, Any]:
    """Its evaluations and what its steps consumed; trained first if it is not there."""
    if not (run / "summary.json").exists():
        command = ["-m", "april", "train", RECIPE, "--processes", str(processes), "--output", str(run)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["recipe"]["trainer"]["processes"] == processes
    evaluations = [{key: found[key] for key in ("step", "eval_reward", "accuracy")} for found in summary["evaluations"]]
    return {"evaluations": evaluations, **{key: summary[key] for key in ("steps", "consumed_tokens", "staleness_mean")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        base = options.runs or Path(place)
        found = {f"processes = {count}": trained(base / f"{count}-processes", count) for count in COUNTS}
    sys.argv[1:] = []
    print(save(__file__, {"recipe": RECIPE, **found}))


if __name__ == "__main__":
    main()
