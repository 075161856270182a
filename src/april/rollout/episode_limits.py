"""What episodes are told: the limits of their environments, and what is done about those that fail.

Invariant: an environment that fails, hangs or is lost costs its own sample what the policy says, and no other anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Recovery = Literal["replay", "snapshot", "stateless", "restart"]
"""How an environment that is gone, after a crash or a failure, is brought to where its episode stands. `replay`: reset
with the same seed, and every turn answered again, which must say the same. `snapshot`: `restore` with what `state` said
last. `stateless`: reset; nothing it does depends on the turns before. `restart`: not at all, the episode begins
again."""
OnError = Literal["observe", "end", "reject"]
"""What a failing step means. `observe`: the policy is told the error, and the environment stands as before the turn.
`end`: the episode ends there, with the rewards so far. `reject`: its group is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How long environments may take, how many work at a time, and what is done about those that fail.

    Args:
        recovery: see `Recovery`.
        on_error: see `OnError`. An environment that fails to begin, in every attempt, leaves its group out.
        concurrency: environments that work at a time.
        reset_timeout: seconds a reset may take; None for no limit.
        step_timeout: seconds a step may take; None for no limit.
        deadline: seconds that the environment of one episode may take altogether, over all its turns; None for no
            limit. Waiting for slots or for training counts nothing.
        max_retries: new environments that are tried, one after the other, for one turn whose environment was lost, and
            for a beginning that failed.
        retry_delay: seconds before the first of them; twice as long before each further one.
        max_restarts: times that one episode may begin again before its group is left out.

    Raises:
        ValueError: names the setting.
    """

    recovery: Recovery = "replay"
    on_error: OnError = "observe"
    concurrency: int = 64
    reset_timeout: float | None = 60.0
    step_timeout: float | None = 60.0
    deadline: float | None = None
    max_retries: int = 3
    retry_delay: float = 0.5
    max_restarts: int = 3

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        for name, kinds in (("recovery", get_args(Recovery)), ("on_error", get_args(OnError))):
            require(getattr(self, name) in kinds, name, f"must be one of {', '.join(kinds)}")
        require(self.concurrency >= 1, "concurrency", "at least one environment must work")
        for name in ("reset_timeout", "step_timeout", "deadline"):
            seconds = getattr(self, name)
            require(seconds is None or seconds > 0, name, "must be positive seconds, or None for no limit")
        for name in ("max_retries", "retry_delay", "max_restarts"):
            require(getattr(self, name) >= 0, name, "must not be negative")
