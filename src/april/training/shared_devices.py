"""Turns of a run whose engine and trainer use the same devices.

    take:       close the gate of server starts; engine: interrupt, sleep; check the memory that it has freed;
                trainer's state to the devices
    (training)
    give_back:  trainer scores the canary; gradients and optimizer state to the host; engine: wake weights, update;
                parameters to the host; open the gate; engine: wake the KV cache; check the canary

Invariants:
- the trainer's state is on the devices only while the engine is ASLEEP, its parameters also until UPDATED
  (`april.engines.device_turns`);
- no server starts while the trainer has or moves anything on the devices;
- if all servers died during a turn, they are started while the trainer is off the devices, and the turn is repeated
  from their sleep on: weights reach them as in any turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from april.engines.device_memory import is_out_of_memory
from april.engines.device_turns import SleepingEngine
from april.engines.freed_memory import FreedMemory
from april.engines.pool import EnginePool
from april.engines.replica import Scorer
from april.engines.start_gate import StartGate
from april.engines.weight_sync import NoReplicaError
from april.rollout.engine import EngineError
from april.training.canary import Canary, Scores
from april.training.learner import Learner
from april.training.offload import Part
from april.training.recovery import TrainingError

log = logging.getLogger(__name__)

UPDATED_FROM = frozenset({Part.PARAMETERS, Part.ROUNDED})
"""Parts from which the engine's weights are updated."""
TRAINING = "training"
"""Name of the phase in which the trainer trains."""
ATTEMPTS = 3
"""Times that all engines may die in one turn before the run ends."""

Phase = tuple[str, float, float]
"""Name, beginning and end in seconds since the turn began."""


class RunsInThread(Protocol):
    def __call__(self, work: Callable[..., Any], *args: object) -> Awaitable[Any]: ...


class SharedDevices:
    """Gives the devices to the trainer and back to the engine.

    Args:
        engine: the run's engine.
        learner: the trainer's state.
        gate: gate of the servers that april starts on these devices.
        memory: check of the memory that the engine frees.
        canary: None for an engine that computes with the trainer's parameters.
        run: runs a function in the thread that trains.
        moved: parts of the trainer's memory that are on the devices only in its turns.
    """

    def __init__(
        self,
        engine: SleepingEngine,
        learner: Learner,
        gate: StartGate,
        memory: FreedMemory,
        canary: Canary | None,
        run: RunsInThread,
        moved: frozenset[Part],
    ) -> None:
        self._engine = engine
        self._learner = learner
        self._gate = gate
        self._memory = memory
        self._canary = canary
        self._run = run
        self._moved = moved
        self._began = 0.0
        self.exchange_seconds = 0.0
        """Duration of the latest turn without training."""
        self._phases: list[Phase] = []
        if canary is not None and isinstance(engine, EnginePool):
            engine.verify_with(canary.verify)

    async def begin(self, update: Callable[[], Awaitable[None]]) -> None:
        """Make the first turn, without training: it updates the engine, shows at once whether the engine frees memory,
        and measures the band of the canary.

        Args:
            update: updates the engine's weights.

        Raises:
            EngineError: the engine frees nothing, or does not compute the trainer's policy.
        """
        canary = self._canary
        before = await self._scores() if canary and canary.band is None and not canary.resumed else []
        await self.take(self._moved & UPDATED_FROM)
        await self._score()
        if canary and before:
            canary.set_band(before)
        await self.give_back(update)

    async def take(self, parts: frozenset[Part] | None = None) -> None:
        """Give the devices to the trainer. Nothing may be in flight.

        Args:
            parts: parts that move to the devices; all by default.

        Raises:
            EngineError: the engine did not free its memory.
            TrainingError: the trainer's memory does not fit beside what the engine keeps.
        """
        self._began, self._phases = time.monotonic(), []
        self._engine.turns.take()
        if self._gate.starting:
            log.info("training waits until %d servers on its devices have started", self._gate.starting)
        with self.phase("wait for starts of servers"):
            await self._gate.close()
        self._memory.before()
        await self._engine.sleep()
        await self._memory.require()
        await self._to_devices(self._moved if parts is None else parts)

    async def _to_devices(self, parts: frozenset[Part]) -> None:
        with self.phase("trainer to devices"):
            try:
                await self._run(self._learner.to_device, parts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingError(
                    f"the trainer's {', '.join(sorted(parts))} do not fit on a GPU beside the sleeping engine, which "
                    f"keeps {self._memory.kept / 1e9:.1f} GB: set lora.rank or more trainer.processes, or "
                    'trainer.layout = "split" with GPUs of their own'
                ) from None

    async def give_back(self, update: Callable[[], Awaitable[None]]) -> None:
        """Update the engine's weights and let it serve.

        Args:
            update: updates the engine's weights; called again if all servers have died.

        Raises:
            EngineError: no engine serves the trainer's policy.
        """
        await self._score()
        with self.phase("gradients and optimizer to host"):
            await self._run(self._learner.to_host, self._moved - UPDATED_FROM)
        for _ in range(ATTEMPTS):
            try:
                await self._wake(update)
            except NoReplicaError as error:
                log.warning("all engines died while the trainer had the devices (%s); they are started again", error)
                await self._restart()
            else:
                if self._canary and self._canary.band is None:  # no server was there to be scored before
                    self._canary.set_band(await self._scores())
                trained = sum(ended - began for name, began, ended in self._phases if name == TRAINING)
                self.exchange_seconds = time.monotonic() - self._began - trained
                return
        raise EngineError(f"all engines died {ATTEMPTS} times while they were updated: see their logs")

    async def _wake(self, update: Callable[[], Awaitable[None]]) -> None:
        await self._engine.wake_weights()
        await update()
        await self._leave()
        await self._engine.wake_kv_cache()
        if self._canary and not isinstance(self._engine, EnginePool):
            for one in self._scorers:
                try:
                    await self._canary.verify(one)
                except EngineError as first:
                    log.warning("%s; it gets the weights again", first)
                    await update()
                    await self._canary.verify(one)

    async def _leave(self) -> None:
        """Take the trainer off the devices, and let servers start."""
        with self.phase("parameters to host"):
            await self._run(self._learner.to_host, self._moved)
        self._gate.open()

    async def _restart(self) -> None:
        """Wait for a server that starts again, and repeat the turn up to the trainer's parameters on the devices."""
        assert isinstance(self._engine, EnginePool), "other engines live as long as this process"
        await self._leave()
        with self.phase("restart of servers"):
            await self._engine.restarted()
            await self._gate.close()
        await self._engine.sleep()
        await self._to_devices(self._moved & UPDATED_FROM)

    async def _score(self) -> None:
        if self._canary:
            with self.phase("canary"):
                self._canary.expected = await self._run(self._learner.token_logprobs, self._canary.tokens)

    async def _scores(self) -> list[Scores]:
        """Return the scores of engines that answer."""
        assert self._canary is not None
        scored = await asyncio.gather(*map(self._canary.scores, self._scorers), return_exceptions=True)
        for error in scored:
            if isinstance(error, BaseException) and not isinstance(error, EngineError):
                raise error
        return [scores for scores in scored if not isinstance(scores, BaseException)]

    @property
    def _scorers(self) -> Sequence[Scorer]:
        if isinstance(self._engine, EnginePool):
            return [replica for replica in self._engine.replicas if isinstance(replica, Scorer)]
        return [self._engine] if isinstance(self._engine, Scorer) else []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of the turn."""
        began = time.monotonic()
        yield
        self._phases.append((name, began - self._began, time.monotonic() - self._began))

    def take_phases(self) -> list[Phase]:
        """Return the phases of the turn and the engine's transitions, by beginning."""
        own = [
            (f"engine {transition.state.value}", transition.began - self._began, transition.ended - self._began)
            for transition in self._engine.turns.take()
        ]
        return sorted((*self._phases, *own), key=lambda phase: phase[1])

    def metrics(self) -> dict[str, float]:
        """Return the latest turn's `exchange_seconds`, and `canary_gap`: the largest mean difference of a replica from
        the trainer in nats since the last call."""
        gaps = {} if self._canary is None else self._canary.gaps
        if self._canary is not None:
            self._canary.gaps = {}
        return {"exchange_seconds": self.exchange_seconds} | ({"canary_gap": max(gaps.values())} if gaps else {})
