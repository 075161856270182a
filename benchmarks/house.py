"""Cost of a change: two source trees run their own benchmarks in turn, and the ratios of their figures are reported.

    python benchmarks/house.py BEFORE AFTER --pairs 5
    python benchmarks/house.py BEFORE AFTER --sections scheduler_throughput absorb --name episodes

BEFORE and AFTER are checkouts. Each runs the scripts of its own `benchmarks/` in a copy, or `april` itself, on its own
sources; `absorb.py`, which knows both, where a checkout has none. A section is replaced in the JSON, the others stay.

The two of a pair take turns of a tenth of a second: one is stopped while the other works, so that other load on the
machine slows both equally. Rates are therefore per second of processor time: rates that a script prints use its own
processor clock, and other rates the processor time of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from record import machine, spread
from turns import take_turns

SECTIONS: dict[str, tuple[list[str], str]] = {
    "scheduler_throughput": (["scheduler_throughput.py", "--runs", "3", "--steps", "4"], r"^(.+?): ([\d,]+) chunks/s"),
    "absorb": (["absorb.py"], r"^(.+?): ([\d,]+) chunks/s"),
    "durability": (
        ["durability.py", "--pairs", "1", "--steps", "2", "--warm-up", "1"],
        r"'(consumed_tokens_per_second_with(?:out)?)': \{'median': ([\d.]+)",
    ),
    "quickstart": (["-m", "april", "train", "examples/gcd/recipe.toml", "--steps", "3", "--eval-interval", "0"], ""),
}
"""By section the command, and the pattern of a figure's name and value in its output; without a pattern, the figure is
the number of executions per second. More is better."""
PROCESSOR_TIME = """
import runpy, sys, time
time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Run:
    """A section's command on the sources of a checkout."""

    def __init__(self, tree: Path, name: str, directory: Path) -> None:
        command, self._pattern = SECTIONS[name]
        copy = directory / "benchmarks"
        shutil.copytree(tree / "benchmarks", copy, ignore=shutil.ignore_patterns("*.json"))
        if self._pattern:
            script, *arguments = command
            if not (copy / script).exists():  # it is younger than the checkout
                shutil.copy(Path(__file__).with_name(script), copy)
            arguments = ["-c", PROCESSOR_TIME, str(copy / script), *arguments]
        else:
            arguments = [*command, "--output", str(directory / "run")]
        self._output = directory / "output"
        self.command = {
            "args": [sys.executable, *arguments],
            "stdout": self._output.open("w"),
            "env": {**os.environ, "PYTHONPATH": str(tree / "src")},
            "cwd": tree,
        }

    def figures(self, seconds: float) -> dict[str, float]:
        if not self._pattern:
            return {"runs": 1 / seconds}
        rates = re.findall(self._pattern, self._output.read_text(), re.MULTILINE)
        return {kind: float(rate.replace(",", "")) for kind, rate in rates}


def pair(before: Path, after: Path, name: str) -> dict[str, dict[str, float]]:
    """The figures of a section's command on both sources."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        runs = {"before": Run(before, name, Path(one)), "after": Run(after, name, Path(other))}
        seconds = take_turns([run.command for run in runs.values()])
        return {which: run.figures(took) for (which, run), took in zip(runs.items(), seconds, strict=True)}


def section(before: Path, after: Path, name: str, pairs: int) -> dict[str, object]:
    """Medians of each tree, and the ratio after/before pair by pair."""
    measured = []
    for number in range(pairs):
        found = pair(before, after, name)
        measured.append(found)
        print(name, number, {kind: f"{found['after'][kind] / found['before'][kind]:.3f}" for kind in found["after"]})
    kinds = measured[0]["after"]
    return {
        kind: {
            "before": statistics.median(pair["before"][kind] for pair in measured),
            "after": statistics.median(pair["after"][kind] for pair in measured),
            "ratio": spread([pair["after"][kind] / pair["before"][kind] for pair in measured]),
        }
        for kind in kinds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--name", default="", help="of the change, if the figures are kept in a file of their own")
    args = parser.parse_args()
    path = Path(__file__).with_name(f"house{args.name and '_'}{args.name}.json")
    saved = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    for name in args.sections:
        saved["sections"][name] = section(args.before.resolve(), args.after.resolve(), name, args.pairs)
        saved["machine"] = machine()
        path.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
