"""The time of a sample's request in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

RequestOutcome: TypeAlias = Literal["finished", "interrupted", "failed", "turn", "running"]


@dataclass(slots=True)
class RequestInterval:
    """Time of one request of a sample in the engine, within one step. Times are seconds from the start of the step."""

    sample_id: str
    group_id: int
    start: float
    before: int
    """Policy tokens when it was submitted; above 0 means it was resumed."""
    queued: float | None = None
    """Seconds until its first new token; None if none came."""
    first_tokens: int = 0
    """Tokens of the chunk with the first new token."""
    end: float = 0.0
    after: int = 0
    outcome: RequestOutcome = "interrupted"
    """Reason for its end. `turn`: the policy's turn ended, and the environment answers. `running`: the step ended, and
    the sample continues in the next step."""
    running: bool = False
    """The sample was decoding when the step began: it was neither submitted nor prefilled in this step."""
