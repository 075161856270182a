"""Turns of engine and trainer on the same devices: the state of an engine that gives its memory to the trainer.

    SERVING ──interrupt──> INTERRUPTED ──sleep──> ASLEEP ──wake_weights──> WEIGHTS_AWAKE
       ^                                                                        │
       └──────────wake_kv_cache────────── UPDATED <──────update_weights─────────┘

Invariants:
- the state changes only along these arrows, and only after the call that leads along one has succeeded;
- samples are in flight only while SERVING;
- the trainer's state is on the devices only while ASLEEP, its parameters also until UPDATED;
- after ASLEEP, weights and KV cache hold no valid values until they were updated and allocated again.

A failed call leaves the state as it was. A replica that may have changed halfway has to be restarted; a restarted
engine is SERVING. A run that is resumed starts its engines, so all of them are SERVING whatever state they died in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from april.rollout.engine import Engine


class TurnState(Enum):
    """What an engine holds on devices that it shares with the trainer."""

    SERVING = "serving"
    """Weights and KV cache; the trainer holds nothing."""
    INTERRUPTED = "interrupted"
    """As SERVING, and no sample is in flight."""
    ASLEEP = "asleep"
    """Neither weights nor KV cache."""
    WEIGHTS_AWAKE = "weights awake"
    """Memory for weights, whose values are undefined."""
    UPDATED = "updated"
    """The new weights, and no KV cache."""


NEXT = {
    TurnState.SERVING: TurnState.INTERRUPTED,
    TurnState.INTERRUPTED: TurnState.ASLEEP,
    TurnState.ASLEEP: TurnState.WEIGHTS_AWAKE,
    TurnState.WEIGHTS_AWAKE: TurnState.UPDATED,
    TurnState.UPDATED: TurnState.SERVING,
}


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give the memory of its devices to the trainer and take it back.

    `update_weights` leads from WEIGHTS_AWAKE to UPDATED. While SERVING it works as with any engine.
    """

    turns: DeviceTurns

    async def sleep(self) -> None:
        """Release weights and KV cache. No sample is in flight. An engine that computes with the trainer's parameters
        releases its KV cache alone.

        Raises:
            EngineError: the engine did not fall asleep.
        """
        ...

    async def wake_weights(self) -> None:
        """Allocate memory for the weights; `update_weights` has to follow.

        Raises:
            EngineError: the engine did not wake up.
        """
        ...

    async def wake_kv_cache(self) -> None:
        """Allocate the KV cache, which is empty, and serve again.

        Raises:
            EngineError: the engine did not wake up.
        """
        ...


class Transition(NamedTuple):
    """A transition that has succeeded, with its times on the clock of its `DeviceTurns`."""

    state: TurnState
    began: float
    ended: float


class DeviceTurns:
    """State of one engine, and its transitions since the last `take`.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = TurnState.SERVING
        self._clock = clock
        self._transitions: list[Transition] = []

    @property
    def serving(self) -> bool:
        """Whether samples may be submitted."""
        return self.state is TurnState.SERVING

    @contextmanager
    def to(self, state: TurnState) -> Iterator[None]:
        """Change to `state` if the block succeeds."""
        assert NEXT[self.state] is state, f"an engine that is {self.state.value} cannot become {state.value} next"
        began = self._clock()
        yield
        self.state = state
        self._transitions.append(Transition(state, began, self._clock()))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Change to UPDATED if the block, an update of the weights, succeeds; no change while SERVING."""
        with nullcontext() if self.serving else self.to(TurnState.UPDATED):
            yield

    def restarted(self) -> None:
        """Record that the engine was restarted: it holds weights and an empty KV cache."""
        self.state = TurnState.SERVING

    def take(self) -> list[Transition]:
        """Return the transitions since the last call, in order."""
        transitions, self._transitions = self._transitions, []
        return transitions
