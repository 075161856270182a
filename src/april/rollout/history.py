"""Events that happen: each changes the state and is recorded, and after a crash each happens again.

Steps and updates are the caller's doing, so they happen again only when the caller comes to them again: it trains on
the same steps, and makes the same versions once more, in the order in which it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.rollout.engine import Chunk, EngineError
from april.rollout.events import Admitted, Event, Trained, Updated
from april.rollout.journal import Journal
from april.rollout.journal_file import DamageError
from april.rollout.staleness import StalenessError
from april.rollout.state import Absorbed, RolloutState


class History:
    """What happened to a state, in a journal if there is one."""

    def __init__(self, state: RolloutState, journal: Journal | None) -> None:
        self.state = state
        self.journal = journal
        self.prompts: Any = None
        """The state of the prompt stream behind what happened again; None if nothing was admitted."""

    def happen(self, event: Event) -> None:
        self.state.apply(event)
        if self.journal is not None:
            self.journal.record(event)

    def absorb(self, chunks: Sequence[Chunk], among: Any) -> Absorbed:
        """`happen` for what an engine handed out."""
        absorbed = self.state.absorb(chunks, among)
        if self.journal is not None:
            broken = {id(error.chunk) for error in absorbed.broken}
            kept = [chunk for chunk in chunks if len(chunk.token_ids) or chunk.finish is not None]
            self.journal.record(*[chunk for chunk in kept if id(chunk) not in broken])
        return absorbed

    def replay(self) -> Trained | Updated | None:
        """What the journal holds happens again, up to the next step or update, which has not happened again yet; None
        once nothing is left."""
        self.prompts = None
        for event in () if self.journal is None else self.journal.replay():
            if isinstance(event, (Trained, Updated)):
                return event
            self.again(event)
            if isinstance(event, Admitted):
                self.prompts = event.prompts
        return None

    def again(self, event: Event) -> None:
        """An event of the journal happens again.

        Raises:
            DamageError: it cannot have happened.
        """
        assert self.journal is not None
        try:
            self.state.apply(event)
        except (EngineError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            raise DamageError(
                f"{self.journal.path}: event {self.journal.position} does not follow from those before it: {error}"
            ) from None

    def out_of_turn(self, event: Trained | Updated) -> StalenessError:
        """The caller does something else than it did after what has happened again; `event` is what it did."""
        assert self.journal is not None
        self.journal.step_back()
        if isinstance(event, Updated):
            did = f"an update to policy version {event.version}: update the weights as often as before"
        else:
            did = f"a step of policy version {event.step.version}: collect as often as before"
        return StalenessError(f"the journal goes on with {did}")
