"""What a table of samples could save: the scheduler's passes over samples, as objects and as NumPy columns.

The arm `objects` is april's own code: events that are applied to a state, and requests in flight. The arm `columns` is
a prototype of the same passes, in which a sample is a row of a table until user code needs it. Its chunks are columns
too, as an engine of that design would return them. Each step completes half of the groups, in random order and in 290
batches, and interrupts the other half. Prompts, selection and calls of rewards are in neither arm.

    OMP_NUM_THREADS=1 python benchmarks/simulation/sample_columns.py
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.batch import Plan, RolloutBatch
from april.rollout.engine import Fault, make_chunk
from april.rollout.events import Admitted, Trained
from april.rollout.generation.in_flight import InFlight
from april.rollout.params import RolloutParams
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.state import RolloutState
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.seeds import sample_seeds
from april.simulation.blank import BlankSample, BlankSegment, blank

SIZE = 8
"""Samples of a group."""
BATCHES = 290
"""Batches of chunks in which samples finish."""
SAMPLING = SamplingParams(max_tokens=16384)
PROMPT = Prompt((1, 2, 3), "prompt")


class Phases:
    """Processor time of each phase of a step, in microseconds per sample in flight."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.steps: list[dict[str, float]] = []

    def new_step(self) -> None:
        self.steps.append(defaultdict(float))

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.steps[-1][name] += (time.process_time() - began) / self.samples * 1e6


class FreeEngine:
    """Takes samples at no cost."""

    def submit(self, sample: BlankSample) -> None: ...


class Objects:
    """The passes of april's scheduler."""

    def __init__(self, groups: int) -> None:
        self.state = RolloutState(
            RolloutParams(rollout_batch_size=groups // 2, n_samples_per_prompt=SIZE, over_sampling_batch_size=groups),
            LengthModel(SAMPLING.max_tokens),
            FixedAdmission(groups),
            False,
            False,
            BlankSample,
        )
        self.in_flight = InFlight()
        self.intervals: list[Any] = []
        self.batch: list[Any] = []

    def admit(self, count: int) -> None:
        for _ in range(count):
            self.state.apply(Admitted(self.state.buffer.admitted, PROMPT, SIZE, SAMPLING, 0))

    def submit(self) -> None:
        samples = [sample for group in self.state.buffer for sample in group.samples if sample.finish is None]
        self.in_flight.submit(FreeEngine(), samples, 0.0, self.intervals)  # type: ignore[arg-type]

    def chunks(self, groups: Any, tokens: int, finish: bool, rng: np.random.Generator) -> list[list[Any]]:
        """Batches of chunks for all samples of the groups at these places of the buffer: `BATCHES` in random order if
        the samples finish, else one."""
        buffered = list(self.state.buffer)
        samples = [sample for place in groups.tolist() for sample in buffered[place].samples]
        order = rng.permutation(len(samples)).tolist() if finish else range(len(samples))
        rest = blank(tokens), blank(tokens), self.state.engine_version, FinishReason.STOP if finish else None
        chunks = [make_chunk((samples[i].id, *rest, None, Fault.UNKNOWN, None)) for i in order]
        size = -(-len(chunks) // BATCHES) if finish else len(chunks)
        return [chunks[i : i + size] for i in range(0, len(chunks), size)]

    def absorb(self, chunks: list[Any]) -> None:
        absorbed = self.state.absorb(chunks, self.in_flight.samples)
        self.in_flight.mark_started(absorbed.started, 1.0)
        self.in_flight.end(absorbed.ended, 2.0, "finished")

    def interrupt(self, chunks: list[Any]) -> None:
        self.absorb(chunks)
        self.in_flight.end_all(3.0)

    def train(self) -> None:
        batch = RolloutBatch(self.state.engine_version, Plan(1), request_intervals=self.intervals)
        self.state.apply(Trained(list(self.state.ready), batch))
        self.state.engine_version = self.state.trainer_version
        self.intervals, self.batch = [], batch.groups  # frees the former batch

    @property
    def learned(self) -> LengthModel:
        return self.state.lengths


class Columns:
    """The same passes over a table of samples; a group is `SIZE` rows, and a table of groups counts its unfinished
    samples."""

    def __init__(self, groups: int) -> None:
        rows = groups * SIZE
        self.length, self.before, self.seed = (np.zeros(rows, kind) for kind in (np.int64, np.int64, np.uint64))
        self.finish, self.flying = np.zeros(rows, np.int8), np.zeros(rows, np.bool_)
        self.queued, self.end = np.zeros(rows), np.zeros(rows)
        self.first_tokens = np.zeros(rows, np.int64)
        self.segments: list[tuple[int, Any, Any]] = []
        """Version, rows and tokens of each batch of chunks: the samples' segments, until a sample is handed out."""
        self.group_id = np.full(groups, -1, np.int64)
        self.unfinished, self.first_version = np.zeros(groups, np.int64), np.full(groups, -1, np.int64)
        self.free, self.admitted, self.version = np.arange(groups), 0, 0
        self.prompts: list[Prompt | None] = [None] * groups
        self.learned = LengthModel(SAMPLING.max_tokens)
        self.ready: list[Any] = []
        self.batch: list[Any] = []

    def admit(self, count: int) -> None:
        places, self.free = self.free[:count], self.free[count:]
        ids = range(self.admitted, self.admitted + count)
        self.admitted += count
        rows = (places[:, None] * SIZE + np.arange(SIZE)).ravel()
        self.seed[rows] = np.array([sample_seeds(0, id, SIZE) for id in ids], np.uint64).ravel()
        for column in (self.length, self.finish):
            column[rows] = 0
        self.group_id[places], self.unfinished[places], self.first_version[places] = ids, SIZE, -1
        for place in places.tolist():
            self.prompts[place] = PROMPT

    def submit(self) -> None:
        order = np.argsort(self.group_id)
        order = order[self.group_id[order] >= 0]
        rows = (order[:, None] * SIZE + np.arange(SIZE)).ravel()
        rows = rows[(self.finish[rows] == 0) & ~self.flying[rows]]
        self.flying[rows] = True
        self.before[rows], self.first_tokens[rows], self.queued[rows] = self.length[rows], 0, np.nan

    def chunks(self, groups: Any, tokens: int, finish: bool, rng: np.random.Generator) -> list[Any]:
        """As in `Objects`: rows, tokens and whether the samples finish."""
        buffered = np.argsort(self.group_id)
        buffered = buffered[self.group_id[buffered] >= 0]
        rows = (buffered[groups][:, None] * SIZE + np.arange(SIZE)).ravel()
        rows = rng.permutation(rows) if finish else rows
        chunks = np.stack((rows, np.full(len(rows), tokens), np.full(len(rows), int(finish))))
        return np.array_split(chunks, BATCHES, axis=1) if finish else [chunks]

    def absorb(self, chunks: Any) -> None:
        rows, tokens, finish = chunks
        assert self.flying[rows].all()
        assert not self.finish[rows].any()
        self.length[rows] += tokens
        assert (self.length[rows] <= SAMPLING.max_tokens).all()
        self.segments.append((self.version, rows, tokens))
        first = rows[self.first_tokens[rows] == 0]
        self.first_tokens[first], self.queued[first] = tokens[self.first_tokens[rows] == 0], 1.0
        new = first // SIZE
        new = new[self.first_version[new] < 0]
        self.first_version[new] = self.version
        ended = rows[finish > 0]
        self.finish[ended], self.flying[ended], self.end[ended] = finish[finish > 0], False, 2.0
        groups = ended // SIZE
        np.subtract.at(self.unfinished, groups, 1)
        complete = np.unique(groups[self.unfinished[groups] == 0])
        self.ready.append(complete)

    def interrupt(self, chunks: Any) -> None:
        self.absorb(chunks)
        self.end[self.flying] = 3.0
        self.flying[:] = False

    def train(self) -> None:
        places = np.concatenate(self.ready)
        self.ready = []
        present = np.nonzero(np.repeat(self.group_id >= 0, SIZE))[0]
        self.learned.observe(self.before[present], self.length[present], self.finish[present] > 0)
        self.learned.observe_groups(self.length.reshape(-1, SIZE)[places])
        rows = (places[:, None] * SIZE + np.arange(SIZE)).ravel()
        self.batch = self._objects(places, rows)
        self.group_id[places] = -1
        self.free = np.concatenate((self.free, places))
        self._forget_segments()
        self.version += 1

    def _objects(self, places: Any, rows: Any) -> list[Any]:
        """The samples of these groups, as user code gets them."""
        every = np.concatenate([rows for _, rows, _ in self.segments])
        tokens = np.concatenate([tokens for _, _, tokens in self.segments])
        versions = np.repeat([v for v, _, _ in self.segments], [len(rows) for _, rows, _ in self.segments])
        # Tokens of each row and version, in the order of rows and then of versions.
        keys, inverse = np.unique(every * 1024 + versions, return_inverse=True)
        sums = np.bincount(inverse, tokens).astype(int)
        first, last = np.searchsorted(keys // 1024, rows), np.searchsorted(keys // 1024, rows, "right")
        parts = list(zip((keys % 1024).tolist(), sums.tolist(), strict=True))
        bounds = zip(first.tolist(), last.tolist(), strict=True)
        spans = [[BlankSegment(*part) for part in parts[begin:end]] for begin, end in bounds]
        ids = np.repeat(self.group_id[places], SIZE).tolist()
        numbers = ((rows % SIZE).tolist(), self.seed[rows].tolist(), spans, self.length[rows].tolist())
        columns = zip(ids, *numbers, strict=True)
        stop, prompt = FinishReason.STOP, PROMPT.token_ids
        return [BlankSample(g, i, prompt, SAMPLING, seed, s, stop, None, n) for g, i, seed, s, n in columns]

    def _forget_segments(self) -> None:
        """Keep the segments of rows that are still in use."""
        used = np.repeat(self.group_id >= 0, SIZE)
        kept = [(version, rows[used[rows]], tokens[used[rows]]) for version, rows, tokens in self.segments]
        self.segments = [one for one in kept if len(one[1])]


def measure(kind: Any, groups: int, steps: int) -> tuple[list[dict[str, float]], LengthModel]:
    """Microseconds per sample in flight of each phase, in each of `steps` steps after two that are not counted, and the
    lengths that were learned."""
    arm, phases, rng = kind(groups), Phases(groups * SIZE), np.random.default_rng(0)
    arm.admit(groups // 2)
    for _ in range(steps + 2):
        phases.new_step()
        with phases.of("groups, samples and seeds"):
            arm.admit(groups // 2)
        with phases.of("submission"):
            arm.submit()
        everything = np.arange(groups)
        [chunks] = arm.chunks(everything, 1, False, rng)
        with phases.of("first tokens"):
            arm.absorb(chunks)
        completing = rng.permutation(groups)[: groups // 2]
        batches = arm.chunks(completing, 50, True, rng)
        with phases.of("ends, in random order"):
            for chunks in batches:
                arm.absorb(chunks)
        del batches
        [chunks] = arm.chunks(np.setdiff1d(everything, completing), 50, False, rng)
        with phases.of("interrupt"):
            arm.interrupt(chunks)
        with phases.of("batch, and the former one freed"):
            arm.train()
    return phases.steps[2:], arm.learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=262144)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    gc.disable()
    found: dict[str, list[dict[str, float]]] = {"objects": [], "columns": []}
    for _ in range(args.runs):
        objects, learned = measure(Objects, args.samples // SIZE, args.steps)
        columns, as_well = measure(Columns, args.samples // SIZE, args.steps)
        assert np.allclose(learned.at_risk, as_well.at_risk)
        assert np.allclose(learned.finished, as_well.finished)
        found["objects"] += objects
        found["columns"] += columns
    rows = {arm: {name: spread([step[name] for step in steps]) for name in steps[0]} for arm, steps in found.items()}
    for arm, steps in found.items():
        rows[arm]["all"] = spread([sum(step.values()) for step in steps])
        print(arm, {name: round(row["median"], 2) for name, row in rows[arm].items()}, flush=True)
    print(save(__file__, {"settings": vars(args), "microseconds_per_sample_in_flight": rows}))


if __name__ == "__main__":
    main()
