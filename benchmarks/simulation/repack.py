"""Whether it pays to move samples between replicas while a step's tail is generated, in virtual time.

Eight replicas of Qwen3-8B by the roofline. A policy looks at the replicas every two seconds in which no sample waits
for a slot, and moves samples as long as a move pays by its forecast. *Pack* and *spread* are given the best forecast
there can be: the cost model, and how long every response will be.

- *pack* frees a whole replica: all its samples go to one other, where that saves more seconds of busy replicas than all
  replicas together would wait longer for the last sample. *Pack, free* has the KV cache move along at no cost; in all
  other arms a moved sample is prefilled again;
- *spread* moves a sample from the replica that will be done last, where all are done earlier then. *Spread, expected*
  knows the distribution of lengths alone, and takes each response to be as long as those are that got as far;
- *level* knows no costs either: it moves a sample from the replica that holds the most tokens to the one that holds the
  fewest, where the most falls by a tenth or more;
- *6 replicas* and *4 replicas* move nothing and have fewer replicas: what packing is to be compared with, as replicas
  that it frees do something else.

    python benchmarks/simulation/repack.py --save    # all cells, about an hour of one core; fewer by the flags
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.rollout.engine import Chunk
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import simulate
from april.simulation.workload import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import spread

REPLICAS, N, SLOTS = 8, 64, 256
WARM_UP = 4
INTERVAL = 2.0
"""Seconds between two looks at the replicas."""
WORTH = 0.5
"""Seconds that a move has to save at least."""
COSTS = {gpu: roofline(GPUS[gpu], MODELS["qwen3-8b"], Roofline(slots=SLOTS)) for gpu in ("h100", "mi300x")}
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"partial_rollout": False},
    "partial, recompute": {"over_sampling_batch_size": 2 * N, "max_staleness": 3},
    "partial, keep": {"over_sampling_batch_size": 2 * N, "max_staleness": 3, "on_update": "keep"},
    "overlap, keep": {"over_sampling_batch_size": 2 * N, "max_staleness": 3, "on_update": "keep", "overlap": True},
}
SHARE = 0.1
"""By which the most tokens that a replica holds have to fall for `level` to move a sample."""


class Arm(NamedTuple):
    """`worth` is the share of the time to the end that a move has to save at least, where lengths are not `known`."""

    policy: str = ""
    free: bool = False
    known: bool = True
    worth: float = 0.0
    replicas: int = REPLICAS


ARMS = {
    "pack": Arm("pack"),
    "pack, free": Arm("pack", free=True),
    "spread": Arm("spread"),
    "spread, expected": Arm("spread", known=False, worth=0.03),
    "level": Arm("level"),
    "6 replicas": Arm(replicas=6),
    "4 replicas": Arm(replicas=4),
}


class Load:
    """Samples that decode on one replica.

    Args:
        left: tokens that each has still to sample, shape [b].
        held: tokens of KV cache of each, shape [b].
    """

    def __init__(self, left: NDArray[np.int64], held: NDArray[np.int64]) -> None:
        self.left, self.held = left, held

    def with_others(self, others: Load) -> Load:
        return Load(np.concatenate((self.left, others.left)), np.concatenate((self.held, others.held)))

    def part(self, chosen: NDArray[Any]) -> Load:
        return Load(self.left[chosen], self.held[chosen])

    def seconds(self, cost: CostModel, base: NDArray[np.float64]) -> float:
        """Until the last of them is done."""
        order = np.argsort(self.left)
        left, held = self.left[order], self.held[order]
        steps = np.diff(left, prepend=0)
        running = np.arange(len(left), 0, -1)
        # KV of the running samples at the start of each stretch with a constant number: current and sampled tokens.
        kv = held[::-1].cumsum()[::-1] + running * (left - steps)
        read = kv * steps + running * (steps * (steps - 1) // 2)
        return float((steps * base[running]).sum() + cost.kv_token_seconds * read.sum())

    def fits(self, cost: CostModel) -> bool:
        return len(self.left) <= cost.slots and int((self.left + self.held).sum()) <= 0.99 * cost.kv_tokens


class RepackingEngine(SimulatedEngine):
    """Moves samples between replicas if this pays by the policy of `arm`.

    Attributes:
        idle_seconds: seconds of idle replicas while others were busy, summed over replicas.
        busy_seconds: seconds of busy replicas.
        moved: moved samples.
    """

    arm = Arm()
    last: RepackingEngine

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.idle_seconds = self.busy_seconds = 0.0
        self.moved = 0
        self._looked = 0.0
        self._sorted = np.sort(self.workload.sample(20_000))
        RepackingEngine.last = self

    async def poll(self) -> list[Chunk]:
        loop, replicas = asyncio.get_running_loop(), self.replicas
        while self._in_flight and not self.samples.chunks:
            now = loop.time()
            self._start_submitted(now)
            if self.arm.policy and now >= self._looked + INTERVAL and not replicas.queues.counts.any():
                self._looked = now
                self._repack(now)
            until = float(replicas.next_event.min())
            if self._stream_seconds is not None:
                until = min(until, now + self._stream_seconds)
            idle = int((replicas.running + replicas.queues.counts == 0).sum())
            try:
                await asyncio.sleep(until - now)
            finally:
                self.idle_seconds += idle * (loop.time() - now)
                self.busy_seconds += (len(replicas.running) - idle) * (loop.time() - now)
            replicas.advance(until)
            if self._stream_seconds is not None:
                replicas.stream(until)
        return self.samples.take_chunks()

    def _repack(self, now: float) -> None:
        """Move samples as long as that pays."""
        for _ in range(4 * len(self.replicas.running)):
            loads, slots = self._loads(now)
            move = getattr(self, f"_{self.arm.policy}")(
                loads, [load.seconds(self.cost, self.replicas._base) for load in loads]
            )
            if move is None:
                return
            source, target, chosen = move
            self._move(source, slots[source][chosen], target, now)

    def _loads(self, now: float) -> tuple[list[Load], list[NDArray[np.int64]]]:
        """What decodes on each replica, and in which slots."""
        replicas, samples = self.replicas, self.samples
        replicas.advance(now)
        replicas._decode_until(now)
        loads, slots = [], []
        for replica in range(len(replicas.running)):
            taken = np.nonzero(replicas.row[replica] >= 0)[0]
            rows = replicas.row[replica, taken]
            done = samples.done[rows] + np.maximum(replicas.steps[replica] - replicas.first_step[replica, taken], 0)
            left = samples.total[rows] - done
            if not self.arm.known:
                left = np.clip(self._expected(done) - done, 1, samples.limit[rows] - done)
            loads.append(Load(left, samples.prompt[rows] + done))
            slots.append(taken)
        return loads, slots

    def _expected(self, done: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mean length of the responses that are longer than `done`."""
        at = np.minimum(np.searchsorted(self._sorted, done, side="right"), len(self._sorted) - 1)
        means: NDArray[np.float64] = self._sorted[::-1].cumsum()[::-1] / np.arange(len(self._sorted), 0, -1)
        return means[at].astype(np.int64)

    def _moving(self, load: Load) -> float:
        """Seconds that it takes to take up moved samples, in which what decodes there stands still."""
        if self.arm.free:
            return 0.0
        each = self.cost.prefill_token_seconds * load.held + self.cost.prefill_pair_seconds * load.held**2
        return float(each.sum())

    def _pack(self, loads: list[Load], ends: list[float]) -> tuple[int, int, NDArray[np.int64]] | None:
        latest, best, found = max(ends), WORTH, None
        for source, target in itertools.permutations(np.nonzero(ends)[0].tolist(), 2):
            together = loads[target].with_others(loads[source])
            if not together.fits(self.cost):
                continue
            end = together.seconds(self.cost, self.replicas._base) + self._moving(loads[source])
            saved = ends[source] + ends[target] - end - len(self.replicas.running) * max(end - latest, 0.0)
            if saved > best:
                best, found = saved, (source, target, np.arange(len(loads[source].left)))
        return found

    def _spread(self, loads: list[Load], ends: list[float]) -> tuple[int, int, NDArray[np.int64]] | None:
        source = int(np.argmax(ends))
        load, best, found = loads[source], ends[source] - max(WORTH, self.arm.worth * ends[source]), None
        if len(load.left) < 2:
            return None
        for target in np.argsort(ends)[:2].tolist():
            for sample in np.argsort(-load.left)[:3].tolist():
                chosen = np.arange(len(load.left)) == sample
                moved = load.part(chosen)
                there = loads[target].with_others(moved)
                if target == source or not there.fits(self.cost):
                    continue
                here = load.part(~chosen).seconds(self.cost, self.replicas._base)
                end = max(here, there.seconds(self.cost, self.replicas._base) + self._moving(moved))
                if end < best:
                    best, found = end, (source, target, np.nonzero(chosen)[0])
        return found

    def _level(self, loads: list[Load], ends: list[float]) -> tuple[int, int, NDArray[np.int64]] | None:
        held = [int(load.held.sum()) for load in loads]
        source, target = int(np.argmax(held)), int(np.argmin(held))
        each = loads[source].held
        falls = np.minimum(each, held[source] - held[target] - each)
        if not len(each) or falls.max() < SHARE * held[source]:
            return None
        return source, target, np.array([np.argmax(falls)])

    def _move(self, source: int, slots: NDArray[np.int64], target: int, now: float) -> None:
        replicas, samples = self.replicas, self.samples
        rows = replicas.row[source, slots]
        replicas._stop_running({samples.ids[row] for row in rows.tolist()})
        for row in rows.tolist():
            replicas.caches.pop(samples.ids[row], None)
        samples.done[rows] = samples.sent[rows]
        samples.held[rows] = samples.prompt[rows] + samples.done[rows] if self.arm.free else 0
        replicas.waiting_kv[target] += samples.held[rows].sum()
        replicas.queues.append(rows, np.full(len(rows), target))
        replicas._fill_slots(np.array([source, target]), now)
        self.moved += len(rows)


def run(gpu: str, name: str, setting: str, arm: Arm, seed: int, steps: int) -> dict[str, float]:
    RepackingEngine.arm = arm
    workload = dataclasses.replace(WORKLOADS[name], rollout_batch_size=N, seed=seed)
    # With overlapped training, a token takes half the time that full engines need for one.
    training = 0.5 / (REPLICAS * COSTS[gpu].ceiling(4000.0)) if "overlap" in setting else 0.0
    outcome = simulate(
        workload,
        COSTS[gpu],
        replicas=arm.replicas,
        steps=steps,
        warm_up=WARM_UP,
        train_token_seconds=training,
        engine_type=RepackingEngine,
        seed=seed,
        **SETTINGS[setting],
    )
    engine = RepackingEngine.last
    busy = engine.busy_seconds / (engine.idle_seconds + engine.busy_seconds)
    return {
        "consumed_tokens_per_second": outcome.overall_tokens_per_second,
        "mean_staleness": outcome.mean_staleness,
        "busy_replicas": busy * arm.replicas,
        "moved_share_of_samples": engine.moved / (steps * N * workload.n_samples_per_prompt),
        "prefilled_tokens": engine.replicas.prefilled_tokens,
    }


def measure(gpu: str, setting: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All arms on one workload, the ratio of consumed tokens/s to no moves seed by seed."""
    seeds = range(options.seeds)
    plain = [run(gpu, name, setting, Arm(), seed, options.steps) for seed in seeds]
    cell: dict[str, Any] = {"gpu": gpu, "setting": setting, "workload": name, "none": plain, "arms": {}}
    for arm in options.arms:
        runs = [run(gpu, name, setting, ARMS[arm], seed, options.steps) for seed in seeds]
        ratio, busy = (
            spread([after[figure] / before[figure] for before, after in zip(plain, runs, strict=True)])
            for figure in ("consumed_tokens_per_second", "busy_replicas")
        )
        cell["arms"][arm] = {"ratio": ratio, "busy": busy, "runs": runs}
        print(
            f"{gpu:6} {setting:18} {name:9} {arm:15} x {ratio['median']:.3f} ({ratio['min']:.3f} to "
            f"{ratio['max']:.3f}), busy x {busy['median']:.2f}, moved {runs[0]['moved_share_of_samples']:.2f}",
            flush=True,
        )
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--gpus", nargs="+", default=list(COSTS), choices=list(COSTS))
    parser.add_argument("--workloads", nargs="+", default=["lognormal", "heavy", "bimodal"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--save", action="store_true", help="write what is measured into the JSON file beside")
    options = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"] if options.save and path.exists() else []
    for where in itertools.product(options.gpus, options.settings, options.workloads):
        results = [cell for cell in results if (cell["gpu"], cell["setting"], cell["workload"]) != where]
        results.append(measure(*where, options))
        if options.save:
            document = {
                "command": f"python benchmarks/simulation/{path.stem}.py --save, cell by cell",
                "settings": {"replicas": REPLICAS, "rollout_batch_size": N, "n_samples_per_prompt": 8, **SETTINGS},
                "costs": {gpu: vars(cost) for gpu, cost in COSTS.items()},
                "results": results,
            }
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
