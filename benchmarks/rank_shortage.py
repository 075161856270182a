"""Cost of a memory shortage in one of two ranks: all ranks restart, with micro-batches half as long.

The second rank of a small run raises an allocator's exception, once, in the middle of the pass over a batch. The figure
is the seconds from there to the end of that step, and of an undisturbed step before it.

    OMP_NUM_THREADS=1 python benchmarks/rank_shortage.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import save, spread

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from april.reporting.metrics_log import last_step, read_metrics  # noqa: E402
from april.training import rank_launcher  # noqa: E402
from april.training.rank_supervisor import RankSupervisor  # noqa: E402
from tests.ranks.runs import recipe_in  # noqa: E402

NOTE = "APRIL_SHORTAGE"
STEP = 3


def rank() -> int:
    """A rank; the second one lacks memory in its first pass of step `STEP`, and notes when."""
    from april.commands.rank import main as rank_main
    from april.training.sharded import ShardedLearner

    train, gradient, note = ShardedLearner.train, ShardedLearner.gradient, Path(os.environ[NOTE])
    now = 0

    def trained(self: ShardedLearner, step: Any, number: int) -> dict[str, float]:
        nonlocal now
        now = number
        return train(self, step, number)

    def short(self: ShardedLearner, batch: Any) -> Any:
        if now == STEP and self.ranks.rank == 1 and not note.exists():
            note.write_text(repr(time.time()))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate more than there is")
        return gradient(self, batch)

    ShardedLearner.train = trained  # type: ignore[method-assign]
    ShardedLearner.gradient = short  # type: ignore[method-assign]
    return rank_main()


def once(base: Path, name: str) -> tuple[float, float]:
    """Seconds from the shortage to the end of its step, and of the step before it."""
    recipe, note, run = recipe_in(base, name), base / f"{name}.note", base / name
    process = subprocess.Popen(
        [sys.executable, __file__, "--part", "agent", str(recipe)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), NOTE: str(note)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while last_step(run) < STEP:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    seconds = time.time() - float(note.read_text())
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert "rank 1 ran out of memory; micro-batches have 256 tokens after the restart; all ranks restart" in said, said
    (before,) = (row["seconds"] for row in read_metrics(run) if row.get("step") == STEP - 1)
    return seconds, before


def run_agent(recipe: Path) -> int:
    from april.config.reading import load_recipe

    rank_launcher.COMMAND = [sys.executable, __file__, "--part", "rank"]
    return RankSupervisor(load_recipe(recipe)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "agent", "rank"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("recipe", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.part == "rank":
        return rank()
    if options.part == "agent":
        return run_agent(options.recipe)
    with tempfile.TemporaryDirectory() as base:
        found = [once(Path(base), f"run-{number}") for number in range(options.runs)]
    shortages, steps = zip(*found, strict=True)
    print(save(__file__, {"seconds_to_the_end_of_the_step": spread(shortages), "seconds_of_a_step": spread(steps)}))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as `april.commands.rank` ends
