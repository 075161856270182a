"""Replicas of the simulated engine: what runs on each, and its next event.

Each replica batches continuously on its own: samples wait in the order of submission, prefill stalls decoding, every
running sample gains one token a decode step, and if the KV cache is full, the youngest samples are preempted. Nothing
is computed token by token: a replica goes from one event (a prefill ends, a sample finishes, the KV cache is full) to
the next, and all replicas whose next event is due are advanced together, as NumPy rows.

Invariants:
- a replica never runs more than `slots` samples, nor do running samples hold more KV than `kv_tokens`;
- between two events nothing about a replica changes but the number of decode steps that it has done.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.sampling import FinishReason
from april.simulation.cost_model import CostModel
from april.simulation.sample_table import SampleTable
from april.simulation.waiting_queues import WaitingQueues

NEVER = np.iinfo(np.int32).max
"""Decode step that no replica reaches."""
WATERMARK = 0.01
"""Share of the KV cache that admission leaves free, so that an admitted sample is not preempted at once."""


class Replicas:
    """`count` replicas that work on the samples of a table.

    Args:
        episodes: note which samples have ended their episode.

    Attributes:
        queues: rows of samples that wait.
        caches: replica and tokens of the KV cache of each interrupted sample, and of each one whose environment is at
            work, by sample id. They take no room from running samples.
        ended: ids of samples whose episode has ended.
        running: samples on each replica, [replicas].
        next_event: time of the next event of each replica, [replicas].
        preemptions, prefilled_tokens, prefill_seconds: totals over all replicas.
        resumed_prefill_seconds: the part of `prefill_seconds` of samples submitted with a response and without its
            KV cache.
        peak_kv: largest share of its KV cache that any replica has used.
    """

    def __init__(self, cost: CostModel, count: int, samples: SampleTable, episodes: bool = False) -> None:
        self.cost = cost
        self.samples = samples
        self.queues = WaitingQueues(count, cost.slots)
        self.caches: dict[str, tuple[int, int]] = {}
        self.ended: set[str] = set()
        self._episodes = episodes
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.prefill_seconds = 0.0
        self.resumed_prefill_seconds = 0.0
        self.peak_kv = 0.0
        self._base = cost.base()

        # By replica: clock, decode steps done, running samples and tokens of their KV, the next event.
        self.clock = np.zeros(count)
        self.steps = np.zeros(count, np.int64)
        self.running = np.zeros(count, np.int64)
        self.kv = np.zeros(count, np.int64)
        self.waiting_kv = np.zeros(count, np.int64)
        """Tokens of KV of waiting samples."""
        self._last_group = np.full(count, -1, np.int64)
        self.next_event = np.full(count, np.inf)
        self._steps_to_event = np.zeros(count, np.int64)
        """Decode steps until the next event; 0 if the event is the end of a prefill."""
        self._admissions = np.zeros(count, np.int64)

        # By replica and slot: the row of the sample, the decode step before its first token, the decode step of its
        # last token, and its number in the order of admission.
        # The steps are 32 bits wide: every event reads all of a replica's.
        slots = (count, cost.slots)
        self.row = np.full(slots, -1, np.int64)
        self.first_step = np.full(slots, NEVER, np.int32)
        self._last_step = np.full(slots, NEVER, np.int32)
        self._admission = np.full(slots, -1, np.int64)

    @property
    def busy(self) -> bool:
        return bool(self.running.any() or self.queues.counts.any())

    def clear(self) -> None:
        """Reset all replicas, on which nothing is in flight. Clocks continue."""
        self.samples.clear()
        self.queues.clear()
        for rows in (self.row, self._admission):
            rows.fill(-1)
        for steps in (self.first_step, self._last_step):
            steps.fill(NEVER)
        for counts in (self.running, self.kv, self.waiting_kv, self._steps_to_event):
            counts.fill(0)
        self._last_group.fill(-1)
        self.next_event.fill(np.inf)

    # Called by the engine.

    def add(self, rows: NDArray[np.int64], replica: NDArray[np.int64], now: float) -> None:
        """Queue the samples in `rows`, each on its replica."""
        np.add.at(self.waiting_kv, replica, self.samples.held[rows])
        self.queues.append(rows, replica)
        self._fill_slots(np.unique(replica), now)

    def take_caches(self, sample_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Remove the KV caches of these samples; return the replica of each, or -1, and its tokens."""
        if not self.caches:
            return np.full(len(sample_ids), -1), np.zeros(len(sample_ids), np.int64)
        caches = [self.caches.pop(id, (-1, 0)) for id in sample_ids]
        replica, tokens = np.array(caches, np.int64).T
        return replica, tokens.copy()

    def stop(self, sample_ids: Container[str] | None, now: float) -> None:
        """Hand out the tokens of the named samples, and take the samples out; all of them if None."""
        self.advance(now)
        self._decode_until(now)
        stopped = np.unique(np.concatenate((self._stop_running(sample_ids), self._stop_waiting(sample_ids))))
        if self.busy:
            self._fill_slots(stopped, now)
        else:
            self.clear()

    def stream(self, now: float) -> None:
        """Hand out the tokens that running samples have at `now`."""
        self._decode_until(now)
        self._hand_out(*np.nonzero(self.row >= 0))

    def advance(self, until: float) -> None:
        """Process every event up to `until`."""
        while len(due := (self.next_event <= until).nonzero()[0]):
            self._process_event(due)

    # Stopping.

    def _stop_running(self, sample_ids: Container[str] | None) -> NDArray[np.int64]:
        """Free the slots of the named samples; return their replicas."""
        replicas, slots = np.nonzero(self.row >= 0)
        chosen = self.samples.named(self.row[replicas, slots], sample_ids)
        replicas, slots = replicas[chosen], slots[chosen]
        rows = self._hand_out(replicas, slots)
        tokens = self.samples.prompt[rows] + self.samples.sent[rows]
        # A sample that is stopped in its first prefill has no complete KV cache to keep.
        started = self.samples.sent[rows] > 0
        self._keep_caches(rows[started], replicas[started], tokens[started])
        np.subtract.at(self.kv, replicas, tokens)
        self._vacate(replicas, slots)
        return replicas

    def _stop_waiting(self, sample_ids: Container[str] | None) -> NDArray[np.int64]:
        """Take the named samples out of their queues; return their replicas."""
        samples, replicas = self.samples, []
        for replica in np.nonzero(self.queues.counts)[0].tolist():
            waiting = self.queues.rows(replica)
            chosen = samples.named(waiting, sample_ids)
            if not chosen.any():
                continue
            replicas.append(replica)
            leaving = waiting[chosen]
            held = leaving[samples.held[leaving] > 0]
            self._keep_caches(held, np.full(len(held), replica), samples.held[held])
            self.waiting_kv[replica] -= samples.held[held].sum()
            unsent = samples.done[leaving] - samples.sent[leaving]  # of preempted samples
            samples.hand_out(leaving[unsent > 0], unsent[unsent > 0])
            self.queues.replace(replica, waiting[~chosen])
        return np.array(replicas, np.int64)

    def _hand_out(self, replicas: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Hand out the tokens of the samples in these slots; return their rows."""
        samples, rows = self.samples, self.row[replicas, slots]
        sampled = samples.done[rows] + np.maximum(self.steps[replicas] - self.first_step[replicas, slots], 0)
        fresh = sampled - samples.sent[rows]
        samples.sent[rows] = sampled
        samples.hand_out(rows[fresh > 0], fresh[fresh > 0])
        return rows

    def _keep_caches(self, rows: NDArray[np.int64], replicas: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        places = zip(replicas.tolist(), tokens.tolist(), strict=True)
        self.caches.update(zip([self.samples.ids[row] for row in rows.tolist()], places, strict=True))

    def _fill_slots(self, replicas: NDArray[np.int64], now: float) -> None:
        """Let idle replicas admit samples at once, and decoding ones at the end of the current decode step."""
        idle = replicas[self.running[replicas] == 0]
        self.clock[idle] = np.maximum(self.clock[idle], now)
        self._steps_to_event[idle] = 0
        self._schedule(np.concatenate((idle, self._finish_step(replicas, now))))

    # Decode steps.

    def _decode_until(self, now: float) -> None:
        """Do the decode steps that have ended at `now`; the current one is lost."""
        decoding = np.nonzero(self._steps_to_event > 0)[0]
        steps = np.floor(self._steps_within(decoding, now) + 1e-6)
        # Events up to `now` are processed already: despite rounding, the last step before the next event is left to it.
        self._step(decoding, np.minimum(steps, self._steps_to_event[decoding] - 1))

    def _finish_step(self, replicas: NDArray[np.int64], now: float) -> NDArray[np.int64]:
        """Bring decoding replicas to the end of the current step and return them.

        Replicas with an event at that time are left out: they admit samples at the event.
        """
        decoding = replicas[self._steps_to_event[replicas] > 0]
        n = np.maximum(np.ceil(self._steps_within(decoding, now) - 1e-6), 0)
        early = n < self._steps_to_event[decoding]
        decoding, n = decoding[early], n[early]
        self._step(decoding, n)
        return decoding

    def _steps_within(self, replicas: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Decode steps, and a fraction, from the clock of each replica to `now`."""
        b = self.running[replicas]
        passed = np.maximum(now - self.clock[replicas], 0.0)
        # n steps take n * (base + cost * kv) + cost * b * n (n - 1) / 2 seconds; solved for n without cancellation.
        slope = self.cost.kv_token_seconds * b / 2
        first = self._base[b] + self.cost.kv_token_seconds * self.kv[replicas] - slope
        steps: NDArray[np.float64] = 2 * passed / (first + np.sqrt(first * first + 4 * slope * passed))
        return steps

    def _step(self, replicas: NDArray[np.int64], n: NDArray[Any]) -> None:
        n = n.astype(np.int64)
        self.clock[replicas] += self._seconds(replicas, n)
        self.steps[replicas] += n
        self.kv[replicas] += n * self.running[replicas]
        self._steps_to_event[replicas] -= n

    def _seconds(self, replicas: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that the next `n` decode steps take with the samples that run now."""
        b = self.running[replicas]
        kv = self.kv[replicas] * n + b * (n * (n - 1) // 2)
        seconds: NDArray[np.float64] = n * self._base[b] + self.cost.kv_token_seconds * kv
        return seconds

    # Events.

    def _process_event(self, replicas: NDArray[np.int64]) -> None:
        """Advance each of `replicas` to its next event, and determine the one after it."""
        n = self._steps_to_event[replicas]
        self.clock[replicas] = self.next_event[replicas]
        self.steps[replicas] += n
        self.kv[replicas] += n * self.running[replicas]
        self._steps_to_event[replicas] = 0
        # In this order: a prefill may yield a sample's last token, and finished samples free slots for waiting ones.
        if not n.all():
            self._end_prefill(replicas[n == 0])
        self._finish(replicas)
        self._schedule(replicas)

    def _end_prefill(self, replicas: NDArray[np.int64]) -> None:
        """The prefill yields the first token of each sample that took part."""
        samples = self.samples
        at, slots = ((self.row[replicas] >= 0) & (self.first_step[replicas] == NEVER)).nonzero()
        at = replicas[at]
        rows = self.row[at, slots]
        # The prefill itself yields one token, so a sample counts from the decode step before the current one.
        before = self.steps[at] - 1
        self.first_step[at, slots] = before
        self._last_step[at, slots] = before + samples.total[rows] - samples.done[rows]
        np.add.at(self.kv, at, 1)
        # A preempted sample has unsent tokens, which wait for its next event, and no first token here.
        first = rows[(samples.done[rows] == samples.sent[rows]) & (samples.total[rows] - samples.done[rows] > 1)]
        samples.sent[first] += 1
        samples.hand_out(first, np.ones(len(first), np.int64))

    def _finish(self, replicas: NDArray[np.int64]) -> None:
        """Hand out finished samples and free their slots; between two turns of an episode the KV cache stays."""
        samples = self.samples
        at, slots = (self._last_step[replicas] <= self.steps[replicas, None].astype(np.int32)).nonzero()
        if not len(at):
            return
        at = replicas[at]
        rows = self.row[at, slots]
        totals = samples.total[rows]
        full = (totals >= samples.limit[rows]).tolist()
        reasons = [FinishReason.LENGTH if cut else FinishReason.STOP for cut in full]
        samples.hand_out(rows, totals - samples.sent[rows], reasons)
        np.subtract.at(self.kv, at, samples.prompt[rows] + totals)
        self._vacate(at, slots)
        if self._episodes:
            last = samples.last[rows]
            self._keep_caches(rows[~last], at[~last], (samples.prompt[rows] + totals)[~last])
            self.ended.update(samples.ids[row] for row in rows[last].tolist())

    def _vacate(self, at: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        self.row[at, slots] = self._admission[at, slots] = -1
        self.first_step[at, slots] = self._last_step[at, slots] = NEVER
        np.subtract.at(self.running, at, 1)

    def _schedule(self, replicas: NDArray[np.int64]) -> None:
        """Fill free slots, make room in the KV cache, and determine the next event of each of `replicas`."""
        if self.queues.counts[replicas].any():
            seconds = self._admit(replicas)
            prefilling = seconds > 0
            # Prefill stalls decoding: these replicas do no decode step before it ends.
            first = replicas[prefilling]
            self.next_event[first] = self.clock[first] + seconds[prefilling]
            self._steps_to_event[first] = 0
            replicas = replicas[~prefilling]
        self._preempt(replicas)
        b = self.running[replicas]
        decoding = replicas
        if not b.all():
            empty, decoding = replicas[b == 0], replicas[b > 0]
            self.next_event[empty] = np.inf
            self._steps_to_event[empty] = 0
            b = self.running[decoding]
        if len(decoding):
            until_finish = self._last_step[decoding].min(axis=1) - self.steps[decoding]
            # At least one step, because `_preempt` has made room for it.
            until_full = (self.cost.kv_tokens - self.waiting_kv[decoding] - self.kv[decoding]) // b
            n = np.minimum(until_finish, until_full)
            self._steps_to_event[decoding] = n
            self.next_event[decoding] = self.clock[decoding] + self._seconds(decoding, n)

    def _admit(self, replicas: NDArray[np.int64]) -> NDArray[np.float64]:
        """Give free slots to waiting samples while their KV cache fits; return the seconds that their prefill takes."""
        samples, seconds = self.samples, np.zeros(len(replicas))
        wanted = np.minimum(self.queues.counts[replicas], self.cost.slots - self.running[replicas])
        index = (wanted > 0).nonzero()[0]
        if not len(index):
            return seconds
        at, limit = replicas[index], int(self.cost.kv_tokens * (1 - WATERMARK))
        # The next rows of each replica's queue, [replicas, most wanted]; those that fit are a prefix.
        most = int(wanted[index].max())
        queued = np.arange(most) < wanted[index, None]
        rows = np.where(queued, self.queues.first(at, most), 0)
        tokens = samples.prompt[rows] + samples.done[rows]
        # KV caches of waiting samples do not count: they are dropped below if their room is needed.
        fits = queued & (self.kv[at, None] + np.cumsum(tokens, axis=1) <= limit)
        count = fits.sum(axis=1)
        some = count > 0
        index, at, rows, tokens, fits, count = (x[some] for x in (index, at, rows, tokens, fits, count))
        if not len(at):
            return seconds
        # Before `held` is reset: tokens in the KV cache are not prefilled again.
        seconds[index] = self._prefill_seconds(at, rows, tokens, fits, count)
        self.queues.pop(at, count)
        self.waiting_kv[at] -= (samples.held[rows] * fits).sum(axis=1)
        self.running[at] += count
        self.kv[at] += (tokens * fits).sum(axis=1)
        # The stable sort puts free slots first.
        free = np.argsort(self.row[at] >= 0, axis=1, kind="stable")[:, :most]
        which, order = np.nonzero(fits)
        slots = free[which, order]
        samples.held[rows[which, order]] = 0
        self.row[at[which], slots] = rows[which, order]
        self._admission[at[which], slots] = self._admissions[at[which]] + order
        self._admissions[at] += count
        excess = self.kv[at] + self.waiting_kv[at] - limit
        for replica, more in zip(at.tolist(), excess.tolist(), strict=True):
            if more > 0:
                self._evict(replica, more)
        return seconds

    def _prefill_seconds(
        self,
        at: NDArray[np.int64],
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        fits: NDArray[np.bool_],
        count: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Seconds of the prefill of `rows` [replicas, samples], where they fit: of tokens without KV cache."""
        held = self.samples.held[rows]
        groups = np.concatenate((self._last_group[at, None], self.samples.group[rows]), axis=1)
        shared = (groups[:, 1:] == groups[:, :-1]) & (held == 0) & self.cost.prefix_caching
        prefill = np.maximum(tokens - np.where(shared, self.samples.prompt[rows], held), 1) * fits
        # tokens^2 - (tokens - prefill)^2: new tokens attend to the cached ones and to each other.
        pairs = prefill * (2 * tokens - prefill)
        self._last_group[at] = groups[np.arange(len(at)), count]
        self.prefilled_tokens += int(prefill.sum())
        costs = self.cost.prefill_token_seconds * prefill + self.cost.prefill_pair_seconds * pairs
        self.prefill_seconds += float(costs.sum())
        # A preempted sample has unsent tokens; its prefill has another cause than being resumed.
        done = self.samples.done[rows]
        resumed = (done > 0) & (done == self.samples.sent[rows]) & (held == 0)
        self.resumed_prefill_seconds += float(costs[resumed].sum())
        # Never 0, also without any costs: `_schedule` recognises an admission by its seconds.
        seconds: NDArray[np.float64] = costs.sum(axis=1) + self.cost.request_seconds * count + 1e-12
        return seconds

    def _evict(self, replica: int, tokens: int) -> None:
        """Drop KV caches of samples that wait on a replica, the last in the queue first, until `tokens` are free."""
        held = self.samples.held
        rows = self.queues.rows(replica)[::-1]
        rows = rows[held[rows] > 0]
        enough = int(np.searchsorted(np.cumsum(held[rows]), tokens)) + 1
        self.waiting_kv[replica] -= held[rows[:enough]].sum()
        held[rows[:enough]] = 0

    def _preempt(self, replicas: NDArray[np.int64]) -> None:
        """Where the KV cache has no room for another decode step, drop caches of waiting samples, and then return the
        youngest running samples to the queue."""
        samples, size = self.samples, self.cost.kv_tokens
        self.peak_kv = max(self.peak_kv, float(self.kv[replicas].max(initial=0) / size))
        while True:
            excess = self.kv[replicas] + self.running[replicas] + self.waiting_kv[replicas] - size
            full, excess = replicas[excess > 0], excess[excess > 0]
            if not len(full):
                return
            cached = self.waiting_kv[full] > 0
            for replica, tokens in zip(full[cached].tolist(), excess[cached].tolist(), strict=True):
                self._evict(replica, tokens)
            full = full[~cached]
            # One sample per replica and round: replicas without excess then leave the loop.
            slots = np.argmax(self._admission[full], axis=1)
            rows = self.row[full, slots]
            # At readmission the tokens sampled so far are prefilled together with the prompt.
            samples.done[rows] += self.steps[full] - self.first_step[full, slots]
            self.kv[full] -= samples.prompt[rows] + samples.done[rows]
            self._vacate(full, slots)
            self.queues.push_front(rows, full)
            self.preemptions += len(full)
