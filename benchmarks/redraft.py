"""What becomes of unfinished samples at a weight update: computed anew, kept, or redrafted. And what drafts bring.

The quickstart recipe with N' = 1.5 N, trained as it stands but for `on_update`, a run of its own for each arm and seed,
in turn. A fourth arm is the first with tokens drafted while samples decode. Reported of each run: tokens trained on per
processor second (training and rollouts, one thread), staleness, held-out accuracy, and of drafts how many tokens there
were and how many the new weights kept.

    python benchmarks/redraft.py          # about half an hour of one core; --steps 2 --seeds 1 to try it
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import save, spread

ARMS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "keep": {"on-update": "keep"},
    "redraft": {"on-update": "redraft"},
    "drafts": {"draft-tokens": 8},
}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(args: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "april", "train", args.recipe, "--output", f"{directory}/run"]
        settings = {"on-update": "recompute", "over-sampling-batch-size": 48, "steps": args.steps, "seed": seed}
        settings |= {"threads": 1, "eval-interval": args.steps, **ARMS[arm]}
        began = processor_seconds()
        subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in settings.items())],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        seconds = processor_seconds() - began
        lines = Path(directory, "run", "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "step_consumed_tokens" in line]
    assert len(steps) == args.steps

    def total(name: str) -> float:
        return sum(step.get(name, 0) for step in steps)

    drafts = total("draft_tokens")
    return {
        "arm": arm,
        "seed": seed,
        "processor_seconds": seconds,
        "consumed_tokens": total("step_consumed_tokens"),
        "tokens_per_processor_second": total("step_consumed_tokens") / seconds,
        "staleness_mean": total("staleness_mean") / len(steps),
        "off_policy_token_share": total("off_policy_token_share") / len(steps),
        "accuracy": [step["accuracy"] for step in steps if step.get("accuracy") is not None],
        "samples_redrafted": total("samples_redrafted"),
        "draft_tokens": drafts,
        "draft_tokens_kept": total("draft_tokens_kept"),
        "kept_of_a_draft": total("draft_tokens_kept") / max(1, total("samples_redrafted")),
        "kept_share": total("draft_tokens_kept") / max(1, drafts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="examples/gcd/recipe.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        for turn in range(len(ARMS)):
            runs.append(run(args, list(ARMS)[(turn + seed) % len(ARMS)], seed))
            shown = {name: value for name, value in runs[-1].items() if name not in ("consumed_tokens", "draft_tokens")}
            print(json.dumps(shown), flush=True)
        by_seed = {name: [r["tokens_per_processor_second"] for r in runs if r["arm"] == name] for name in ARMS}
        ratios = {
            f"{arm} to recompute": spread([a / b for a, b in zip(by_seed[arm], by_seed["recompute"], strict=True)])
            for arm in list(ARMS)[1:]
        }
        save(__file__, {"steps": args.steps, "tokens_per_processor_second": ratios, "runs": runs})
    print(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
