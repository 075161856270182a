"""Time to a target accuracy with a real vLLM server: partial against synchronous rollouts, GRPO on `factors`.

As in the second study (`protocol.md`), at the rate that was best for both sides there: N = 8, N' = 16, bound 5, twelve
steps, fresh seeds, paired. Seconds are CPU time of the trainer and of every process of the server together, so that
what else the machine does counts little. One server serves all runs; the two arms of a seed run one after the other. A
server draws by itself, so a run cannot be repeated to the token.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/on_vllm.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from analysis import as_ratio, bootstrap, machine
from comparison import differences, mean_accuracy, runs_of, sign_flip
from remedies import Run
from remedies_analysis import curve, log_ratios, ratios_to, spent, target_of
from study import HERE, recorded, run, run_cells

from april.config.checking import check_recipe
from april.config.recipe import Recipe
from april.engines.servers.launch import Launch, launch_vllm

sys.path.insert(0, str(HERE.parent))
from overlap_real import children, processor_seconds

RATE = 1.7e-4
SEEDS = range(700, 708)
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": 8},
    "partial": {},
}


@dataclass(frozen=True)
class ServerRun(Run):
    """One run on the server."""

    arms = ARMS
    url: ClassVar[str] = ""

    def recipe(self, output: Path) -> Recipe:
        recipe = super().recipe(output)
        recipe.engine.engine, recipe.engine.urls, recipe.engine.on_update = "vllm", (self.url,), "recompute"
        check_recipe(recipe)
        return recipe

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    of = {arm: runs_of(records, SEEDS, arm=arm) for arm in ARMS}
    target, found = target_of(of["synchronous"]), differences(of["partial"], of["synchronous"])
    costs = ratios_to(target, of["partial"], of["synchronous"])
    return {
        "command": "python benchmarks/accuracy/on_vllm.py",
        "machine": machine(),
        "runs": len(records),
        "target": target,
        "accuracy": {arm: round(mean_accuracy(runs), 4) for arm, runs in of.items() if runs},
        "curve": {arm: curve(runs) for arm, runs in of.items() if runs},
        "minus_synchronous": bootstrap(found),
        "p": sign_flip(found),
        "samples_to_target": as_ratio(bootstrap(costs["samples_to_target"])),
        "cpu_seconds_to_target": as_ratio(bootstrap(costs["cpu_seconds_to_target"])),
        "cpu_seconds": as_ratio(bootstrap(log_ratios(of["partial"], of["synchronous"], spent))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "on_vllm.jsonl")
    parser.add_argument("--server-python", type=Path, default=HERE.parents[1] / ".servers/vllm/bin/python")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    path, cells = arguments.output, [ServerRun("vllm", "factors", "grpo", a, RATE, s) for s in SEEDS for a in ARMS]
    options = ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(2**29), "--dtype", "float32"]
    options += ["--max-model-len", "384", "--max-num-seqs", "128", "--skip-tokenizer-init"]
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if arguments.runs != 0:
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
            how = Launch(log_dir=folder, python=arguments.server_python, arguments=options, environment=variables)
            serving = launch_vllm(HERE / "models/factors", how)
            server = runner.run(serving.__aenter__())
            ServerRun.url = server.url
            pids = [server.process.pid, *children(server.process.pid)]
            try:
                measured = partial(run, cpu=lambda: time.process_time() + sum(map(processor_seconds, pids)))
                run_cells(cells, path, arguments.runs, measured)
            finally:
                with suppress(ProcessLookupError):
                    runner.run(serving.__aexit__(None, None, None))
    (HERE / "on_vllm.json").write_text(json.dumps(analyse(recorded(path)), indent=1) + "\n")


if __name__ == "__main__":
    main()
