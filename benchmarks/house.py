"""What a change of the house costs: two source trees run their own benchmarks in turn, and the ratios of their figures.

    python benchmarks/house.py BEFORE AFTER --pairs 5

BEFORE and AFTER are checkouts. Each runs the scripts of its own `benchmarks/` in a copy, or `april` itself, on its own
sources. A section is replaced in the JSON, the others stay. Rates are per second of processor time: those that a script
prints by the clock of its process, the others by that of everything the command starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import machine, spread

SECTIONS: dict[str, tuple[list[str], str]] = {
    "scheduler_throughput": (["scheduler_throughput.py", "--runs", "1", "--steps", "4"], r"^(.+?): ([\d,]+) chunks/s"),
    "durability": (
        ["durability.py", "--pairs", "1", "--steps", "1", "--warm-up", "1"],
        r"'(consumed_tokens_per_second_with(?:out)?)': \{'median': ([\d.]+)",
    ),
    "quickstart": (["-m", "april", "train", "examples/gcd/recipe.toml", "--steps", "3", "--eval-interval", "0"], ""),
}
"""By section the command, and what finds a figure's name and value in what it prints; without that, the figure is how
often it could be run in a second. More is better."""
PROCESSOR_TIME = """
import runpy, sys, time
time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Others may use the machine meanwhile: figures are by the processor's clock."""


def run(tree: Path, command: list[str], pattern: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "benchmarks"
        shutil.copytree(tree / "benchmarks", copy, ignore=shutil.ignore_patterns("*.json"))
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        if pattern:
            script, *arguments = command
            arguments = ["-c", PROCESSOR_TIME, str(copy / script), *arguments]
        else:
            arguments = [*command, "--output", str(Path(directory) / "run")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment, cwd=tree
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not pattern:
        return {"runs": 1 / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)}
    return {name: float(value.replace(",", "")) for name, value in re.findall(pattern, done.stdout, re.MULTILINE)}


def section(before: Path, after: Path, name: str, pairs: int) -> dict[str, object]:
    """Medians of each tree, and the ratio after/before pair by pair."""
    command, pattern = SECTIONS[name]
    measured = []
    for number in range(pairs):
        turn = [("before", before), ("after", after)]
        found = {which: run(tree, command, pattern) for which, tree in (turn if number % 2 else turn[::-1])}
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
    args = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    saved = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    for name in args.sections:
        saved["sections"][name] = section(args.before.resolve(), args.after.resolve(), name, args.pairs)
    saved["machine"] = machine()
    path.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
