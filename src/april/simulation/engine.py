"""An engine that follows a cost model, for a scheduler that runs in virtual time.

Replicas batch continuously, each on its own: samples wait in the order of submission, prefill stalls decoding, every
running sample gains one token a decode step, and who no longer fits the KV cache is preempted, the youngest first.
Nothing is done token by token: a replica goes from one event (a prefill ends, a sample finishes, the KV cache is full)
to the next, and all replicas whose next event is due do so together, as NumPy rows.

This file is longer than others because its arrays are one value: every method changes several of them together, and
no part of them means anything alone.

Invariants:
- a sample's length is the workload's under the policy that samples its last token; the scheduler learns it when that is
  out;
- a replica never runs more than `slots` samples, nor holds more KV than `kv_tokens` for running ones;
- between two events nothing about a replica changes but the number of decode steps it has done;
- everything follows from the cost model, the workload and what was submitted when: same calls, same results.

Of an episode, a stay ends with the turn, and the sample's KV cache stays where it is, beside those of interrupted ones:
it takes no room from running samples while its environment is at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from april.engines.chunk_queue import parted
from april.rollout.engine import Capacity, Chunk, EngineError, Fault, KVPolicy, make_chunk
from april.rollout.sampling import FinishReason
from april.rollout.trajectory import Sample
from april.simulation.blank import blank
from april.simulation.cost_model import CostModel

NEVER = np.iinfo(np.int64).max
WATERMARK = 0.01
"""Share of the KV cache that admission leaves free, so that who is admitted is not preempted at once."""
AFFINITY = 0.25
"""How much more than the average load, as a share of its slots, a replica may have and still be given back the samples
whose KV cache it holds."""


class Lengths(Protocol):
    """How long responses are; a `Workload` says it, for one."""

    def lengths(self, prompts: NDArray[np.int64], seeds: NDArray[np.uint64], version: int) -> NDArray[np.int64]: ...


class Turns(Protocol):
    """Where the turns of an episode end; `april.simulation.turns` says it."""

    def end(self, sample: Sample) -> int:
        """Response tokens at which the turn that the policy speaks is over."""
        ...


class SimulatedEngine:
    """Replicas of one engine, simulated.

    Args:
        cost: what work costs on one replica, and what it holds.
        workload: how long responses are.
        replicas: engines of that kind.
        on_update: what happens to the KV cache of interrupted samples when the weights change.
        resolution: seconds by which chunks may come late, so that many replicas' events are handed out together. What
            the replicas do is exact whatever it is.
        stream_seconds: hand out what every running sample has at least this often. By default tokens come with a
            sample's first one, at its end and when it is interrupted, which is all that a scheduler needs.
        turns: of episodes; a response is one turn if None.

    Attributes:
        room: tokens that a sample may hold, with its prompt; an episode that has as many is over.
        over: samples that have said their last turn.
    """

    def __init__(
        self,
        cost: CostModel,
        workload: Lengths,
        replicas: int = 1,
        on_update: KVPolicy = "recompute",
        resolution: float = 0.0,
        stream_seconds: float | None = None,
        turns: Turns | None = None,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"replicas = {replicas}: needs at least one")
        self.cost = cost
        self.workload = workload
        self.replicas = replicas
        self.capacity = Capacity(cost.slots * replicas, cost.kv_tokens, cost.kv_tokens * replicas)
        self.room = int(cost.kv_tokens * (1 - WATERMARK))
        self.version = 0
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.peak_kv = 0.0
        """Most of its KV cache that any replica has used, as a share."""
        self._on_update = on_update
        self._resolution = resolution
        self._stream_seconds = stream_seconds
        self._turns = turns
        self.over: set[str] = set()
        self._base = cost.base()
        self._submitted: list[tuple[str, int, int, int, int, int, int, int]] = []
        self._parked: dict[str, tuple[int, int]] = {}
        """Replica and tokens of the KV cache of each interrupted sample."""
        self._chunks: list[Chunk] = []

        # Samples in flight, by row; rows are given out anew when nothing is in flight.
        self._ids: list[str] = []
        self._prompt = np.zeros(0, np.int64)
        self._group = np.zeros(0, np.int64)
        self._total = np.zeros(0, np.int64)
        self._done = np.zeros(0, np.int64)
        self._limit = np.zeros(0, np.int64)
        self._held = np.zeros(0, np.int64)
        self._out = np.zeros(0, np.int64)
        """Tokens handed out."""
        self._last = np.zeros(0, np.bool_)
        """The response is over with the turn."""

        # Replicas: clock, decode steps done, running samples, their KV, and the next event.
        shape = (replicas, cost.slots)
        self._clock = np.zeros(replicas)
        self._steps = np.zeros(replicas, np.int64)
        self._running = np.zeros(replicas, np.int64)
        self._kv = np.zeros(replicas, np.int64)
        self._cached = np.zeros(replicas, np.int64)
        """KV of waiting samples that a replica holds."""
        self._last_group = np.full(replicas, -1, np.int64)
        self._next = np.full(replicas, np.inf)
        self._stride = np.zeros(replicas, np.int64)
        """Decode steps until the next event; 0 if it is the end of a prefill."""
        self._admissions = np.zeros(replicas, np.int64)

        # Slots: the row in it, the decode step before its first token here and of its last, and its turn of admission.
        self._row = np.full(shape, -1, np.int64)
        self._began = np.full(shape, NEVER, np.int64)
        self._ends = np.full(shape, NEVER, np.int64)
        self._turn = np.full(shape, -1, np.int64)

        # Waiting rows of each replica: a ring, so that who is preempted can go back to the front.
        self._queue = np.full((replicas, 16), -1, np.int64)
        self._head = np.zeros(replicas, np.int64)
        self._waiting = np.zeros(replicas, np.int64)

    @property
    def running(self) -> int:
        waiting = len(self._submitted)
        return int(self._running.sum()) + min(waiting, self.capacity.slots - int(self._running.sum()))

    @property
    def _in_flight(self) -> bool:
        return bool(self._submitted or self._chunks or self._running.any() or self._waiting.any())

    def submit(self, sample: Sample) -> None:
        """Start or resume a sample; it begins at the next `poll`."""
        prompt, heard, budget = len(sample.prompt_ids), sample.environment_tokens, sample.sampling.max_tokens
        turn = NEVER if self._turns is None else self._turns.end(sample)
        if prompt + budget > self.room:
            raise ValueError(
                f"sample {sample.id}: a prompt of {prompt} tokens and a response of up to {budget} do not fit a KV "
                f"cache of {self.cost.kv_tokens} tokens (kv_tokens); lower max_tokens or give the engine more memory"
            )
        place = (sample.length, min(budget + heard, self.room - prompt), heard, turn)
        self._submitted.append((sample.id, sample.prompt_ids[0], prompt, sample.seed, *place))

    async def poll(self) -> list[Chunk]:
        loop = asyncio.get_running_loop()
        while self._in_flight and not self._chunks:
            self._take_up(loop.time())
            until = float(self._next.min()) + self._resolution
            if self._stream_seconds is not None:
                until = min(until, loop.time() + self._stream_seconds)
            # Nothing past the present is settled yet: a cancelled poll, or a sample submitted meanwhile, changes it.
            await asyncio.sleep(until - loop.time())
            self._advance(until)
            if self._stream_seconds is not None:
                self._decode_until(until)
                self._stream(*np.nonzero(self._row >= 0))
        return self._take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        if not self._in_flight:
            return []
        named = None if sample_ids is None else set(sample_ids)
        loop = asyncio.get_running_loop()
        self._take_up(loop.time())
        self._advance(loop.time())
        self._decode_until(loop.time())
        replicas = np.concatenate((self._stop_running(named), self._stop_waiting(named)))
        if self._running.any() or self._waiting.any():
            self._go_on(np.unique(replicas), loop.time())
        else:
            self._clear()
        await asyncio.sleep(self.cost.interrupt_seconds)
        return self._take(named)

    def _stop_running(self, named: Container[str] | None) -> NDArray[np.int64]:
        """Hand out what the named running samples have, and free their slots; the replicas they were on."""
        replicas, slots = np.nonzero(self._row >= 0)
        if named is not None:
            chosen = [self._ids[row] in named for row in self._row[replicas, slots].tolist()]
            replicas, slots = replicas[chosen], slots[chosen]
        rows = self._stream(replicas, slots)
        some = self._out[rows] > 0
        self._park(rows[some], replicas[some], self._prompt[rows[some]] + self._out[rows[some]])
        np.subtract.at(self._kv, replicas, self._prompt[rows] + self._out[rows])
        self._vacate(replicas, slots)
        return replicas

    def _stop_waiting(self, named: Container[str] | None) -> NDArray[np.int64]:
        """Take the named samples that wait out of their queues; the replicas they waited on."""
        stopped = []
        for replica in np.nonzero(self._waiting)[0].tolist():
            waiting = self._queued(replica)
            chosen = np.array([named is None or self._ids[row] in named for row in waiting.tolist()])
            if not chosen.any():
                continue
            stopped.append(replica)
            staying, leaving = waiting[~chosen], waiting[chosen]
            held = leaving[self._held[leaving] > 0]
            self._park(held, np.full(len(held), replica), self._held[held])
            self._cached[replica] -= self._held[held].sum()
            fresh = self._done[leaving] - self._out[leaving]
            self._put(leaving[fresh > 0], fresh[fresh > 0])  # preempted
            self._queue[replica, (self._head[replica] + np.arange(len(staying))) % self._queue.shape[1]] = staying
            self._waiting[replica] = len(staying)
        return np.array(stopped, np.int64)

    def _go_on(self, replicas: NDArray[np.int64], now: float) -> None:
        """Samples of `replicas` have left: the queue fills their slots at the end of the step under way."""
        idle = replicas[self._running[replicas] == 0]
        self._clock[idle] = np.maximum(self._clock[idle], now)
        self._stride[idle] = 0
        self._plan(np.concatenate((idle, self._next_boundary(replicas, now))))

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`, which takes the cost model's `update_seconds`."""
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        await asyncio.sleep(self.cost.update_seconds)
        self.version = version
        if self._on_update == "recompute":
            self._parked.clear()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if sample_ids is None:
            self._parked.clear()
        else:
            for id in sample_ids:
                self._parked.pop(id, None)

    async def close(self) -> None:
        await self.interrupt()

    def _put(
        self, rows: NDArray[np.int64], fresh: NDArray[np.int64], finish: Iterable[FinishReason | None] = repeat(None)
    ) -> None:
        """Hand out so many tokens of the samples in `rows`."""
        blanks = list(map(blank, fresh.tolist()))
        ids = [self._ids[row] for row in rows.tolist()]
        fields = zip(ids, blanks, blanks, repeat(self.version), finish, repeat(None), repeat(Fault.UNKNOWN))
        self._chunks += map(make_chunk, fields)

    def _park(self, rows: NDArray[np.int64], replicas: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Remember which replica holds how many tokens of the KV cache of the samples in `rows`."""
        places = zip(replicas.tolist(), tokens.tolist(), strict=True)
        self._parked.update(zip([self._ids[row] for row in rows.tolist()], places, strict=True))

    def _stream(self, replicas: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Hand out what the samples that run there have; their rows."""
        rows = self._row[replicas, slots]
        sampled = self._done[rows] + np.maximum(self._steps[replicas] - self._began[replicas, slots], 0)
        fresh = sampled - self._out[rows]
        self._out[rows] = sampled
        self._put(rows[fresh > 0], fresh[fresh > 0])
        return rows

    def _take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        chunks, self._chunks = parted(self._chunks, sample_ids)
        return chunks

    def _clear(self) -> None:
        """Nothing is in flight."""
        self._ids = []
        for places in (self._row, self._turn):
            places.fill(-1)
        for steps in (self._began, self._ends):
            steps.fill(NEVER)
        for counts in (self._running, self._kv, self._cached, self._stride, self._head, self._waiting):
            counts.fill(0)
        self._last_group.fill(-1)
        self._next.fill(np.inf)

    def _queued(self, replica: int) -> NDArray[np.int64]:
        """Rows that wait on a replica, the next one first."""
        places = (self._head[replica] + np.arange(self._waiting[replica])) % self._queue.shape[1]
        rows: NDArray[np.int64] = self._queue[replica, places]
        return rows

    def _take_up(self, now: float) -> None:
        """Give what was submitted to replicas."""
        if not self._submitted:
            return
        self._advance(now)
        submitted, self._submitted = self._submitted, []
        if not self._running.any() and not self._waiting.any():
            self._clear()
        ids, numbers, prompts, seeds, lengths, budgets, heard, turns = zip(*submitted, strict=True)
        first, count = len(self._ids), len(ids)
        self._ids.extend(ids)
        done, limit = np.array(lengths, np.int64), np.array(budgets, np.int64)
        true = self.workload.lengths(np.array(numbers, np.int64), np.array(seeds, np.uint64), self.version)
        # Who has more than it should, because its length shrank, ends with one more token.
        whole = np.minimum(np.maximum(true + np.array(heard, np.int64), done + 1), limit)
        turn = np.maximum(np.array(turns, np.int64), done + 1)
        homes = [self._parked.pop(id, (-1, 0)) for id in ids] if self._parked else [(-1, 0)] * count
        home, held = (np.array(column, np.int64) for column in zip(*homes, strict=True))
        replica = self._route(home)
        held[replica != home] = 0
        rows = {
            "_prompt": np.array(prompts, np.int64),
            "_group": np.array(numbers, np.int64),
            "_total": np.minimum(whole, turn),
            "_last": whole <= turn,
            "_done": done,
            "_limit": limit,
            "_held": held,
            "_out": done,
        }
        for name, values in rows.items():
            setattr(self, name, np.concatenate((getattr(self, name)[:first], values)))
        np.add.at(self._cached, replica, held)
        self._enqueue(np.arange(first, first + count), replica)
        assert (self._total > self._done)[first:].all(), "a sample has more tokens than its response is long"
        given = np.unique(replica)
        idle = given[self._running[given] == 0]
        self._clock[idle] = np.maximum(self._clock[idle], now)
        self._plan(np.concatenate((idle, self._next_boundary(given, now))))

    def _route(self, home: NDArray[np.int64]) -> NDArray[np.int64]:
        """A replica for each sample: the one that holds its KV cache, or the one with the least load."""
        load = self._running + self._waiting
        replica = home.copy()
        resumed = np.nonzero(home >= 0)[0]
        if len(resumed):
            most = (load.sum() + len(home)) / self.replicas + AFFINITY * self.cost.slots
            order = resumed[np.argsort(home[resumed], kind="stable")]
            per_home = np.bincount(home[resumed], minlength=self.replicas)
            rank = np.arange(len(order)) - np.repeat(np.cumsum(per_home) - per_home, per_home)
            replica[order[rank + load[home[order]] >= most]] = -1
            load = load + np.bincount(replica[replica >= 0], minlength=self.replicas)
        new = np.nonzero(replica < 0)[0]
        if len(new):
            # Places in order of load: the n-th place of a replica is taken after everyone's places below n.
            top = int(np.sort(load)[0]) + -(-len(new) // self.replicas) + int(load.max() - load.min())
            places = np.maximum(top + 1 - load, 0)
            owner = np.repeat(np.arange(self.replicas), places)
            level = np.arange(len(owner)) - np.repeat(np.cumsum(places) - places - load, places)
            replica[new] = owner[np.lexsort((owner, level))[: len(new)]]
        return replica

    def _enqueue(self, rows: NDArray[np.int64], replica: NDArray[np.int64]) -> None:
        order = np.argsort(replica, kind="stable")
        rows, replica = rows[order], replica[order]
        each = np.bincount(replica, minlength=self.replicas)
        needed, size = int((self._waiting + each).max()), self._queue.shape[1]
        # Room for who is preempted, too.
        if needed + self.cost.slots > size:
            grown = np.full((self.replicas, 2 * (needed + self.cost.slots)), -1, np.int64)
            places = (self._head[:, None] + np.arange(size)) % size
            grown[:, :size] = np.take_along_axis(self._queue, places, axis=1)
            self._queue = grown
            self._head.fill(0)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each)
        self._queue[replica, ((self._head + self._waiting)[replica] + rank) % self._queue.shape[1]] = rows
        self._waiting += each

    def _decode_until(self, now: float) -> None:
        """Decode steps that have ended at `now`; the one under way is lost."""
        busy = np.nonzero(self._stride > 0)[0]
        self._step(busy, np.minimum(np.floor(self._steps_within(busy, now) + 1e-6), self._stride[busy] - 1))

    def _next_boundary(self, replicas: NDArray[np.int64], now: float) -> NDArray[np.int64]:
        """Bring replicas that are decoding to the end of the step under way, where they can take up samples.

        Those that have an event there are left out: they take them up at the event.
        """
        busy = replicas[self._stride[replicas] > 0]
        n = np.maximum(np.ceil(self._steps_within(busy, now) - 1e-6), 0)
        early = n < self._stride[busy]
        busy, n = busy[early], n[early]
        self._step(busy, n)
        return busy

    def _steps_within(self, replicas: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Decode steps, and a fraction, from the clock of each replica to `now`."""
        b = self._running[replicas]
        passed = np.maximum(now - self._clock[replicas], 0.0)
        # n steps take n * (base + cost * kv) + cost * b * n (n - 1) / 2 seconds; solved for n without cancellation.
        slope = self.cost.kv_token_seconds * b / 2
        first = self._base[b] + self.cost.kv_token_seconds * self._kv[replicas] - slope
        steps: NDArray[np.float64] = 2 * passed / (first + np.sqrt(first * first + 4 * slope * passed))
        return steps

    def _step(self, replicas: NDArray[np.int64], n: NDArray[Any]) -> None:
        n = n.astype(np.int64)
        b = self._running[replicas]
        self._clock[replicas] += self._seconds(replicas, n)
        self._steps[replicas] += n
        self._kv[replicas] += n * b
        self._stride[replicas] -= n

    def _seconds(self, replicas: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that the next `n` decode steps take, with the samples that run now."""
        b = self._running[replicas]
        kv = self._kv[replicas] * n + b * (n * (n - 1) // 2)
        seconds: NDArray[np.float64] = n * self._base[b] + self.cost.kv_token_seconds * kv
        return seconds

    def _advance(self, until: float) -> None:
        """Go over every event up to `until`."""
        while len(due := (self._next <= until).nonzero()[0]):
            self._meet(due)

    def _meet(self, replicas: NDArray[np.int64]) -> None:
        """Each of `replicas` goes over its next event."""
        n = self._stride[replicas]
        self._clock[replicas] = self._next[replicas]
        self._steps[replicas] += n
        self._kv[replicas] += n * self._running[replicas]
        self._stride[replicas] = 0
        if not n.all():
            self._first_tokens(replicas[n == 0])
        self._finish(replicas)
        self._plan(replicas)

    def _first_tokens(self, replicas: NDArray[np.int64]) -> None:
        """A prefill has ended: it yields the first token of the samples that took part."""
        at, slots = ((self._row[replicas] >= 0) & (self._began[replicas] == NEVER)).nonzero()
        at = replicas[at]
        rows = self._row[at, slots]
        began = self._steps[at] - 1
        self._began[at, slots] = began
        self._ends[at, slots] = began + self._total[rows] - self._done[rows]
        np.add.at(self._kv, at, 1)
        # Who was preempted keeps what it had sampled until its next event: here it has no first token.
        first = rows[(self._done[rows] == self._out[rows]) & (self._total[rows] - self._done[rows] > 1)]
        self._out[first] += 1
        self._put(first, np.ones(len(first), np.int64))

    def _finish(self, replicas: NDArray[np.int64]) -> None:
        at, slots = (self._ends[replicas] <= self._steps[replicas, None]).nonzero()
        if not len(at):
            return
        at = replicas[at]
        rows = self._row[at, slots]
        totals = self._total[rows]
        full = (totals >= self._limit[rows]).tolist()
        self._put(rows, totals - self._out[rows], [FinishReason.LENGTH if cut else FinishReason.STOP for cut in full])
        np.subtract.at(self._kv, at, self._prompt[rows] + totals)
        self._vacate(at, slots)
        if self._turns is not None:
            last = self._last[rows]
            self.over.update(self._ids[row] for row in rows[last].tolist())
            self._park(rows[~last], at[~last], (self._prompt[rows] + totals)[~last])

    def _vacate(self, at: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        self._row[at, slots] = self._turn[at, slots] = -1
        self._began[at, slots] = self._ends[at, slots] = NEVER
        np.subtract.at(self._running, at, 1)

    def _plan(self, replicas: NDArray[np.int64]) -> None:
        """Fill free slots, make room in the KV cache, and say what happens next on each of `replicas`."""
        if self._waiting[replicas].any():
            seconds = self._admit(replicas)
            starting = seconds > 0
            first = replicas[starting]
            self._next[first] = self._clock[first] + seconds[starting]
            self._stride[first] = 0
            replicas = replicas[~starting]
        self._preempt(replicas)
        b = self._running[replicas]
        busy = replicas
        if not b.all():
            empty, busy = replicas[b == 0], replicas[b > 0]
            self._next[empty] = np.inf
            self._stride[empty] = 0
            b = self._running[busy]
        if len(busy):
            until_finish = self._ends[busy].min(axis=1) - self._steps[busy]
            until_full = (self.cost.kv_tokens - self._cached[busy] - self._kv[busy]) // b
            n = np.minimum(until_finish, until_full)
            self._stride[busy] = n
            self._next[busy] = self._clock[busy] + self._seconds(busy, n)

    def _admit(self, replicas: NDArray[np.int64]) -> NDArray[np.float64]:
        """Samples that wait take free slots while their KV cache fits; the seconds their prefill takes."""
        seconds = np.zeros(len(replicas))
        wanted = np.minimum(self._waiting[replicas], self.cost.slots - self._running[replicas])
        index = (wanted > 0).nonzero()[0]
        if not len(index):
            return seconds
        at, limit = replicas[index], int(self.cost.kv_tokens * (1 - WATERMARK))
        # The next rows of each replica's queue, shape [replicas, most wanted]; what fits is a prefix.
        places = np.arange(wanted[index].max())
        queued = places < wanted[index, None]
        rows = np.where(queued, self._queue[at[:, None], (self._head[at, None] + places) % self._queue.shape[1]], 0)
        tokens = self._prompt[rows] + self._done[rows]
        fits = queued & (self._kv[at, None] + np.cumsum(tokens, axis=1) <= limit)
        count = fits.sum(axis=1)
        some = count > 0
        index, at, rows, tokens, fits, count = (x[some] for x in (index, at, rows, tokens, fits, count))
        if not len(at):
            return seconds
        held = self._held[rows]
        groups = np.concatenate((self._last_group[at, None], self._group[rows]), axis=1)
        shared = (groups[:, 1:] == groups[:, :-1]) & (held == 0) & self.cost.prefix_caching
        prefill = np.maximum(tokens - np.where(shared, self._prompt[rows], held), 1) * fits
        pairs = prefill * (2 * tokens - prefill)
        self._last_group[at] = groups[np.arange(len(at)), count]
        self.prefilled_tokens += int(prefill.sum())
        costs = self.cost.prefill_token_seconds * prefill + self.cost.prefill_pair_seconds * pairs
        seconds[index] = costs.sum(axis=1) + self.cost.request_seconds * count + 1e-12

        self._head[at] = (self._head[at] + count) % self._queue.shape[1]
        self._waiting[at] -= count
        self._cached[at] -= (held * fits).sum(axis=1)
        self._running[at] += count
        self._kv[at] += (tokens * fits).sum(axis=1)
        free = np.argsort(self._row[at] >= 0, axis=1, kind="stable")[:, : len(places)]
        which, order = np.nonzero(fits)
        slots = free[which, order]
        self._held[rows[which, order]] = 0
        self._row[at[which], slots] = rows[which, order]
        self._turn[at[which], slots] = self._admissions[at[which]] + order
        self._admissions[at] += count
        excess = self._kv[at] + self._cached[at] - limit
        for replica, more in zip(at.tolist(), excess.tolist(), strict=True):
            if more > 0:
                self._evict(replica, more)
        return seconds

    def _evict(self, replica: int, tokens: int) -> None:
        """Drop the KV cache of samples that wait on a replica, the last in the queue first, until `tokens` are free."""
        rows = self._queued(replica)[::-1]
        rows = rows[self._held[rows] > 0]
        enough = int(np.searchsorted(np.cumsum(self._held[rows]), tokens)) + 1
        self._cached[replica] -= self._held[rows[:enough]].sum()
        self._held[rows[:enough]] = 0

    def _preempt(self, replicas: NDArray[np.int64]) -> None:
        """Where the KV cache has no room for another decode step, caches of waiting samples go, then the youngest
        running samples go back to the queue."""
        size = self.cost.kv_tokens
        self.peak_kv = max(self.peak_kv, float(self._kv[replicas].max(initial=0) / size))
        while True:
            excess = self._kv[replicas] + self._running[replicas] + self._cached[replicas] - size
            over, excess = replicas[excess > 0], excess[excess > 0]
            if not len(over):
                return
            cached = self._cached[over] > 0
            for replica, tokens in zip(over[cached].tolist(), excess[cached].tolist(), strict=True):
                self._evict(replica, tokens)
            over = over[~cached]
            slots = np.argmax(self._turn[over], axis=1)
            rows = self._row[over, slots]
            self._done[rows] += self._steps[over] - self._began[over, slots]
            self._kv[over] -= self._prompt[rows] + self._done[rows]
            self._vacate(over, slots)
            self._head[over] = (self._head[over] - 1) % self._queue.shape[1]
            self._queue[over, self._head[over]] = rows
            self._waiting[over] += 1
            self.preemptions += len(over)
