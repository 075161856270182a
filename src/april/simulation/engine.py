"""An engine that follows a cost model, for a scheduler that runs in virtual time.

Invariants:
- a sample's length is the workload's under the policy that samples its last token; the scheduler learns the length when
  that token is handed out;
- everything follows from the cost model, the workload and the times of submissions: same calls, same results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.trajectory.sample import Sample
from april.simulation.cost_model import CostModel
from april.simulation.load_balancing import choose_replicas
from april.simulation.replicas import NEVER, WATERMARK, Replicas
from april.simulation.sample_table import SampleTable


class Lengths(Protocol):
    """Lengths of responses; a `Workload` is one."""

    def lengths(self, prompts: NDArray[np.int64], seeds: NDArray[np.uint64], version: int) -> NDArray[np.int64]: ...


class Turns(Protocol):
    """Lengths of the turns of an episode, such as `april.simulation.turns.Turns`."""

    def end(self, sample: Sample) -> int:
        """Return the number of response tokens at which the policy's current turn ends."""
        ...


_Submitted: TypeAlias = tuple[str, int, int, int, int, int, int, int]
"""A sample that is added to the table at the next `poll`: its id, number and tokens of the prompt, seed, response
tokens so far, response tokens that the budget allows, environment tokens, and response tokens at which the current turn
ends. A plain tuple, because every unfinished sample is submitted again after an update."""


class SimulatedEngine:
    """Replicas of one engine, simulated.

    A request for an episode's sample ends with its turn. While its environment computes, the sample's KV cache is kept
    and takes no room from running samples, as for an interrupted sample.

    Args:
        cost: costs and capacity of one replica.
        workload: lengths of responses.
        replicas: number of engines.
        on_update: treatment of the KV cache of interrupted samples at a weight update.
        resolution: seconds by which chunks may be late, so that events of many replicas are handed out together. The
            replicas' own times do not depend on it.
        stream_seconds: maximum interval at which the tokens of running samples are handed out. By default tokens are
            handed out with a sample's first one, at its end and when it is interrupted, which suffices for a scheduler.
        turns: lengths of turns; None if a response is one turn.

    Attributes:
        room: tokens that a sample may hold, with its prompt; an episode that reaches it ends.
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
            raise ValueError(f"replicas = {replicas}: must be at least 1")
        self.cost = cost
        self.workload = workload
        self.capacity = Capacity(cost.slots * replicas, cost.kv_tokens, cost.kv_tokens * replicas)
        # Admission leaves the watermark free, so a longer sample would wait for ever.
        self.room = int(cost.kv_tokens * (1 - WATERMARK))
        self.samples = SampleTable()
        self.replicas = Replicas(cost, replicas, self.samples, episodes=turns is not None)
        self._on_update = on_update
        self._resolution = resolution
        self._stream_seconds = stream_seconds
        self._turns = turns
        self._submitted: list[_Submitted] = []

    @property
    def version(self) -> int:
        return self.samples.version

    @property
    def running(self) -> int:
        return min(int(self.replicas.running.sum()) + len(self._submitted), self.capacity.slots)

    @property
    def _in_flight(self) -> bool:
        return bool(self._submitted or self.samples.chunks) or self.replicas.busy

    def submit(self, sample: Sample) -> None:
        """Start or resume a sample; it begins at the next `poll`."""
        prompt, budget = len(sample.prompt_ids), sample.sampling.max_tokens
        if prompt + budget > self.room:
            raise ValueError(
                f"sample {sample.id}: a prompt of {prompt} tokens and a response of up to {budget} do not fit a KV "
                f"cache of {self.cost.kv_tokens} tokens (kv_tokens); lower max_tokens or give the engine more memory"
            )
        self._submitted.append(
            (
                sample.id,
                sample.prompt_ids[0],
                prompt,
                sample.seed,
                sample.length,
                # The budget limits policy tokens only.
                min(budget + sample.environment_tokens, self.room - prompt),
                sample.environment_tokens,
                NEVER if self._turns is None else self._turns.end(sample),
            )
        )

    async def poll(self) -> list[Chunk]:
        loop = asyncio.get_running_loop()
        while self._in_flight and not self.samples.chunks:
            self._start_submitted(loop.time())
            until = float(self.replicas.next_event.min()) + self._resolution
            if self._stream_seconds is not None:
                until = min(until, loop.time() + self._stream_seconds)
            # Events are processed only once they are due: until then a cancelled poll or a new sample may change them.
            await asyncio.sleep(until - loop.time())
            self.replicas.advance(until)
            if self._stream_seconds is not None:
                self.replicas.stream(until)
        return self.samples.take_chunks()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        if not self._in_flight:
            return []
        names = None if sample_ids is None else set(sample_ids)
        now = asyncio.get_running_loop().time()
        # Queued first: samples that no `poll` has started yet must be stopped as well.
        self._start_submitted(now)
        self.replicas.stop(names, now)
        await asyncio.sleep(self.cost.interrupt_seconds)
        return self.samples.take_chunks(names)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Update to policy `version`, which takes the cost model's `update_seconds`."""
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        await asyncio.sleep(self.cost.update_seconds)
        self.samples.version = version
        if self._on_update != "keep":
            self.replicas.caches.clear()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if sample_ids is None:
            self.replicas.caches.clear()
        else:
            for id in sample_ids:
                self.replicas.caches.pop(id, None)

    async def close(self) -> None:
        await self.interrupt()

    def _start_submitted(self, now: float) -> None:
        """Add submitted samples to the table, and queue each of them on a replica."""
        if not self._submitted:
            return
        self.replicas.advance(now)
        submitted, self._submitted = self._submitted, []
        # Rows of the table can be reused only while no slot or queue refers to them.
        if not self.replicas.busy:
            self.replicas.clear()
        columns = zip(*submitted, strict=True)
        ids, numbers, prompt, seeds, length, limit, environment_tokens, turn_end = map(list, columns)
        group, done, budget = (np.array(column, np.int64) for column in (numbers, length, limit))
        true = self.workload.lengths(group, np.array(seeds, np.uint64), self.version)
        # A sample whose length shrank below the tokens it has ends with one more token.
        whole = np.minimum(np.maximum(true + np.array(environment_tokens, np.int64), done + 1), budget)
        turn = np.maximum(np.array(turn_end, np.int64), done + 1)
        total = np.minimum(whole, turn)
        assert (total > done).all(), "a sample has more tokens than its response is long"
        home, held = self.replicas.take_caches(ids)
        load = self.replicas.running + self.replicas.queues.counts
        replica = choose_replicas(home, load, self.cost.slots)
        # A KV cache on another replica cannot be used: these tokens are prefilled again.
        held[replica != home] = 0
        rows = self.samples.add(
            ids,
            whole <= turn,
            prompt=np.array(prompt, np.int64),
            group=group,
            total=total,
            done=done,
            limit=budget,
            held=held,
            sent=done.copy(),
        )
        self.replicas.add(rows, replica, now)
