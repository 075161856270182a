"""Events are applied to the state and recorded in the journal; after a crash they are replayed from it.

Training batches and weight updates are the caller's decisions, so they are replayed only when the caller repeats them:
it trains on the same batches, and makes the same versions again, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.rollout.engine import Chunk, EngineError
from april.rollout.events import Admitted, Event, Trained, Updated
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import DamageError
from april.rollout.staleness import StalenessError
from april.rollout.state import Absorbed, RolloutState


class History:
    """The events of a state, in a journal if there is one."""

    def __init__(self, state: RolloutState, journal: Journal | None) -> None:
        self.state = state
        self.journal = journal
        self.prompts: Any = None
        """State of the prompt stream after the last `replay`; None if no group was admitted in it."""

    def apply(self, event: Event) -> None:
        """Apply an event to the state, and record it."""
        self.state.apply(event)
        if self.journal is not None:
            self.journal.record(event)

    def absorb(self, chunks: Sequence[Chunk], among: Any) -> Absorbed:
        """`apply` for the chunks of an engine."""
        absorbed = self.state.absorb(chunks, among)
        if self.journal is not None:
            # By identity: chunks hold lists, which have no hash, and of two equal chunks only one may be broken.
            broken = {id(error.chunk) for error in absorbed.broken}
            kept = [c for c in chunks if len(c.token_ids) or c.finish is not None or c.routes is not None]
            self.journal.record(*[chunk for chunk in kept if id(chunk) not in broken])
        return absorbed

    def replay(self) -> Trained | Updated | None:
        """Replay events up to the next batch or weight update and return that event unapplied; None at the end."""
        self.prompts = None
        for event in () if self.journal is None else self.journal.replay():
            if isinstance(event, (Trained, Updated)):
                return event
            self.replay_event(event)
            if isinstance(event, Admitted):
                self.prompts = event.prompts
        return None

    def replay_event(self, event: Event) -> None:
        """Apply an event of the journal.

        Raises:
            DamageError: the event does not follow from the events before it.
        """
        assert self.journal is not None
        try:
            self.state.apply(event)
        except (EngineError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            raise DamageError(
                f"{self.journal.path}: event {self.journal.position} does not follow from those before it: {error}"
            ) from None

    def unread(self) -> None:
        """Return the event that `replay` returned last to the journal."""
        assert self.journal is not None
        self.journal.unread()

    def out_of_order(self, event: Trained | Updated) -> StalenessError:
        """Unread `event`, the journal's next, and return the error for a caller that has done something else."""
        self.unread()
        if isinstance(event, Updated):
            expected = f"an update to policy version {event.version}: update the weights as often as before"
        else:
            expected = f"a batch of policy version {event.step.version}: take as many batches as before"
        return StalenessError(f"the journal continues with {expected}")
