"""Partial against synchronous rollouts on a real server, with a long-tailed workload.

Every sample's length is fixed beforehand by its budget (lognormal over groups, and a little within them; no stop
token), so that all arms generate responses of the same lengths for the same prompts. Weights are sent after every step
as if they had changed. Arms:

- `sync N`: synchronous, N groups a step;
- `sync N'`: synchronous, N' groups a step, so with the concurrency of the partial arms;
- `paper`: N' groups in flight, the first N complete make a step, interrupted requests are prefilled again, no bound on
  staleness;
- `ours`: the same with the KV cache kept over updates, and a bound of 5.

All run on one server in turn, a block of steps each, round after round. Reported: consumed tokens/s (tokens of the
groups of the steps, over the whole time, updates included), its ratio to `sync N` of the same round, and
staleness.

    python benchmarks/servers/partial_rollout.py [--engine vllm] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from serving import CONNECT, make_policy, save, spread, start

from april.rollout.engine import KVPolicy
from april.rollout.params import RolloutParams
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample


@dataclass(frozen=True)
class Workload:
    """Response lengths in tokens: lognormal with this median over groups, cut at `longest`."""

    batch: int = 8
    over_sampling: int = 16
    group: int = 4
    median: int = 60
    longest: int = 1000
    sigma: float = 1.0
    within: float = 0.2

    def length(self, sample: Sample) -> int:
        group = np.random.default_rng(sample.group_id).normal(0, self.sigma)
        own = np.random.default_rng((sample.group_id, sample.index)).normal(0, self.within)
        return int(np.clip(self.median * np.exp(group + own), 4, self.longest))


def with_fixed_lengths(engine: Any, workload: Workload) -> Any:
    """Give every sample its own budget, the first time it is submitted."""
    submit = engine.submit

    def submit_fixed(sample: Sample) -> None:
        if not sample.length:
            sample.sampling = replace(sample.sampling, max_tokens=workload.length(sample))
        submit(sample)

    engine.submit = submit_fixed
    return engine


def prompts() -> Iterator[Prompt]:
    for i in itertools.count():
        rng = np.random.default_rng(i)
        yield Prompt(tuple(rng.integers(2, 2000, size=int(rng.integers(16, 64))).tolist()))


class Arm:
    """One way of collecting, and its figures."""

    def __init__(
        self, kind: str, url: str, model: Path, workload: Workload, name: str, groups: int, partial: bool, keep: bool
    ) -> None:
        self.kind, self.url, self.model, self.workload, self.name = kind, url, model, workload, name
        self.on_update: KVPolicy = "keep" if keep else "recompute"
        self.scheduler = RolloutScheduler(
            None,  # type: ignore[arg-type]  # an engine for every block
            prompts(),
            lambda prompt, sample: 0.0,
            RolloutParams(
                rollout_batch_size=workload.batch if partial else groups,
                over_sampling_batch_size=groups,
                n_samples_per_prompt=workload.group,
                partial_rollout=partial,
                max_staleness=5 if keep else None,
                first_come=not keep,
            ),
            sampling=SamplingParams(workload.longest),
        )
        self.staleness: list[float] = []

    async def block(self, steps: int) -> float:
        """Consumed tokens/s over `steps` steps. Samples in flight at the end are resumed in the next block."""
        engine = with_fixed_lengths(await CONNECT[self.kind](self.url, on_update=self.on_update), self.workload)
        self.scheduler.engine = engine
        await self.scheduler.update_weights(self.model, version=self.scheduler.engine_version)
        began, tokens = time.perf_counter(), 0
        for _ in range(steps):
            step = await self.scheduler.next_batch()
            tokens += sum(group.tokens for group in step.groups)
            self.staleness += step.staleness.tolist()
            await self.scheduler.update_weights(self.model)
        elapsed = time.perf_counter() - began
        # A server that is frozen for one arm would keep the next one waiting.
        await engine.close()
        self.scheduler.buffer.check()
        return tokens / elapsed


async def measure(kind: str, url: str, model: Path, workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    def arm(name: str, groups: int, partial: bool, keep: bool = False) -> Arm:
        return Arm(kind, url, model, workload, name, groups, partial, keep)

    arms = [
        arm("sync N", workload.batch, partial=False),
        arm("sync N'", workload.over_sampling, partial=False),
        arm("paper", workload.over_sampling, partial=True),
        arm("ours", workload.over_sampling, partial=True, keep=True),
    ]
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for each in arms:  # buffers are empty and caches cold
        await each.block(2)
        each.staleness.clear()
    for round in range(rounds):
        for each in arms if round % 2 else arms[::-1]:
            rates[each.name].append(await each.block(steps))
        print(kind, {name: round_(values[-1]) for name, values in rates.items()}, flush=True)
    return {
        each.name: {
            "consumed_tokens_per_s": spread(rates[each.name]),
            "ratio_to_sync_N": spread([a / b for a, b in zip(rates[each.name], rates["sync N"], strict=True)]),
            "staleness": {"mean": float(np.mean(each.staleness)), "max": int(np.max(each.staleness))},
            "discarded_tokens": each.scheduler.buffer.discarded_tokens,
        }
        for each in arms
    }


def round_(value: float) -> int:
    return int(value + 0.5)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*CONNECT, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--quick", action="store_true", help="one round of short responses, nothing saved")
    parser.add_argument("--log-dir", type=Path, help="where the servers' logs are kept; not kept if not given")
    args = parser.parse_args()
    workload = Workload()
    if args.quick:
        args.rounds, args.steps = 1, 1
        workload = Workload(median=20, longest=200)
    with tempfile.TemporaryDirectory() as folder:
        model = make_policy(Path(folder) / "policy")
        for kind in CONNECT if args.engine == "both" else [args.engine]:
            slots = workload.over_sampling * workload.group
            async with start(kind, model, args.log_dir or Path(folder), slots) as server:
                results = await measure(kind, server.url, model, workload, args.rounds, args.steps)
                for name, figures in results.items():
                    print(kind, name, figures["ratio_to_sync_N"], figures["staleness"])
            if not args.quick:
                settings = {"workload": vars(workload), "rounds": args.rounds, "steps": args.steps}
                print(save(__file__, kind, {**settings, "arms": results}))


asyncio.run(main())
