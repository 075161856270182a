"""Parameters of a scheduler, as two values that validate themselves.

Invariant: a `RolloutParams` that exists can be kept: N <= N' <= N * (max_staleness + 1) where N' is fixed and there is
a bound. Every rule about N, N', the bound and the choice of groups is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from april.rollout.admission.admission import Admission, largest_target

OnRewardError = Literal["raise", "zero", "reject"]
"""Consequence of a failing reward function: the run stops, the sample scores 0, or its group is left out."""

MAX_STALENESS = 5
"""Default staleness bound."""
AS_THEY_ARE: Mapping[str, str] = MappingProxyType({})
Recovery = Literal["replay", "snapshot", "stateless", "restart"]
"""Recovery of an environment after a crash or failure. `replay`: reset with the same seed and repeat every turn, with
equal observations required. `snapshot`: `restore` with the latest result of `state`. `stateless`: reset alone, because
no answer depends on earlier turns. `restart`: the episode starts again."""
OnError = Literal["observe", "end", "reject"]
"""Action when a step fails. `observe`: the error becomes the observation, and the environment has its state before the
turn. `end`: the episode ends with its rewards so far. `reject`: its group is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParams:
    """Number of groups that are generated at once, and the choice of groups that a step trains on.

    Args:
        rollout_batch_size: complete groups a step trains on (N).
        n_samples_per_prompt: samples in a group (G).
        over_sampling_batch_size: groups in the buffer during a step (N'); if generation overlaps with training, ready
            groups do not count while training waits for them (`RolloutScheduler.refill`); "auto" chooses the number
            from observed lengths and speeds; or an `Admission` of your own.
        max_staleness: the most weight updates between a group's first token and the step that trains on it; None for no
            bound.
        partial_rollout: with False, every step starts and ends with an empty buffer: synchronous and on-policy. N' is
            then N and the bound 0.
        first_come: train on the groups that were complete first instead of the oldest groups; only without a bound.
        ramp_steps: steps over which N' grows from N to its value; 1 makes the first step synchronous, 0 is no ramp.
        admission_window: hold back a complete group while this many groups or more were admitted between the oldest
            unfinished group and it; None for no window.
        redraft: turn buffered responses into drafts when the weights change; the engine verifies them under the new
            weights, so every token is on-policy, and no bound is needed. Only for engines that verify drafts (the
            embedded engine); other engines sample every token again.
        latest_routes: routes of experts replace earlier ones of the same tokens; with False, a token keeps the routes
            of the version that drew the next one.
        fill_routes: routes that were lost are taken from the next version that computes them, for trainers whose format
            has no unknown routes.
        names: names of these settings in error messages, if the user knows them by other names.

    Raises:
        ValueError: settings that cannot be kept; the message names them and the remedy.
    """

    rollout_batch_size: int
    n_samples_per_prompt: int = 8
    over_sampling_batch_size: int | Literal["auto"] | Admission = "auto"
    max_staleness: int | None = MAX_STALENESS
    partial_rollout: bool = True
    first_come: bool = False
    ramp_steps: int = 0
    admission_window: int | None = None
    redraft: bool = False
    latest_routes: bool = False
    fill_routes: bool = False
    names: InitVar[Mapping[str, str]] = AS_THEY_ARE

    def __post_init__(self, names: Mapping[str, str]) -> None:
        def setting(name: str) -> str:
            return f"{names.get(name, name)} = {getattr(self, name)!r}"

        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{setting(name)}: {rule}")

        require(_whole(self.rollout_batch_size, 1), "rollout_batch_size", "a step needs at least one group")
        require(_whole(self.n_samples_per_prompt, 1), "n_samples_per_prompt", "a group needs at least one sample")
        if not self.partial_rollout:
            object.__setattr__(self, "over_sampling_batch_size", self.rollout_batch_size)
            object.__setattr__(self, "max_staleness", 0)
            object.__setattr__(self, "first_come", False)
        elif self.redraft:
            object.__setattr__(self, "max_staleness", None)
        require(
            self.max_staleness is None or _whole(self.max_staleness, 0),
            "max_staleness",
            "give a number of weight updates, or no bound",
        )
        if self.first_come and self.max_staleness is not None:
            first_come = names.get("first_come", "first_come")
            raise ValueError(f"{first_come} cannot keep {setting('max_staleness')}: set it to None, for no bound")
        require(_whole(self.ramp_steps, 0), "ramp_steps", "give a number of steps, 0 for no ramp")
        window = self.admission_window
        require(window is None or _whole(window, 1), "admission_window", "give a number of groups, or no window")
        target = self.over_sampling_batch_size
        require(
            _whole(target, 0) or target == "auto" or hasattr(target, "plan"),
            "over_sampling_batch_size",
            "give auto, or a number of groups",
        )
        automatic = target == "auto" and self.redraft
        require(not automatic, "over_sampling_batch_size", "how much of drafts is kept is not forecast; give a number")
        if isinstance(target, int):
            self._check_target(target, setting)

    def _check_target(self, target: int, setting: Any) -> None:
        size, own = self.rollout_batch_size, setting("over_sampling_batch_size")
        if target < size:
            raise ValueError(
                f"{own} is less than {setting('rollout_batch_size')}: raise it to {size}, for synchronous rollouts, "
                "or more"
            )
        largest = largest_target(size, self.max_staleness)
        if largest is not None and target > largest:
            raise ValueError(
                f"{own} cannot keep {setting('max_staleness')}: with {setting('rollout_batch_size')} at most {largest} "
                # The smallest S with N' <= N * (S + 1).
                f"groups may be in the buffer; lower the first, or raise the second to {-(-target // size) - 1}"
            )

    @property
    def largest_target(self) -> int | None:
        """Largest number of buffered groups for which the staleness bound can be kept; None without a bound."""
        return largest_target(self.rollout_batch_size, self.max_staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSettings:
    """Treatment of rewards and requests that fail.

    Args:
        on_reward_error: consequence of a failing reward function.
        reward_timeout: seconds a reward may take; None for no limit.
        max_retries: requests of one sample in a row, without a token between them, that may fail while the engine
            answers others, before the sample's group is quarantined: left out, with the reason in the step's account,
            and replaced by a new prompt.
        retry_delay: seconds before a sample whose request failed continues from its last token; twice as long after
            each further failure in a row.
        outage_limit: seconds that no request at all may be answered, before `next_batch` raises EngineError. Until then
            nothing is given up, and every sample continues from its last token when the engine answers again.
        max_rejected_groups: groups of one step that may be rejected before `next_batch` gives up; None for no limit.

    Raises:
        ValueError: names the setting.
    """

    on_reward_error: OnRewardError = "raise"
    reward_timeout: float | None = None
    max_retries: int = 3
    retry_delay: float = 0.5
    outage_limit: float = 600.0
    max_rejected_groups: int | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        kinds = ("raise", "zero", "reject")
        require(self.on_reward_error in kinds, "on_reward_error", 'must be "raise", "zero" or "reject"')
        timeout = self.reward_timeout
        require(timeout is None or timeout > 0, "reward_timeout", "must be positive seconds, or None for no limit")
        require(self.max_retries >= 0, "max_retries", "must not be negative")
        require(self.retry_delay >= 0, "retry_delay", "must not be negative seconds")
        require(self.outage_limit > 0, "outage_limit", "must be positive seconds")
        limit = self.max_rejected_groups
        require(limit is None or limit >= 0, "max_rejected_groups", "must not be negative, or None for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of environments and programs: time, concurrency, and treatment of failures.

    Args:
        recovery: see `Recovery`.
        on_error: see `OnError`. A group is left out anyway if every attempt to start an environment fails, or if the
            reward of a program's episode could not be obtained.
        concurrency: environments or programs that execute at a time.
        reset_timeout: time limit of a reset in seconds; None for no limit.
        step_timeout: time limit of a step in seconds; None for no limit.
        deadline: time limit in seconds of the environment of one episode, over all its turns; None for no limit.
            Waiting for slots or for training does not count.
        max_retries: replacement environments for one turn whose environment was lost, and for a failed start.
        retry_delay: seconds before the first replacement; doubled before each further one.
        max_restarts: restarts of one episode before its group is left out.
        parallel_turns: concurrent turns of one episode of a program; further requests wait.

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
    parallel_turns: int = 8

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        for name, kinds in (("recovery", get_args(Recovery)), ("on_error", get_args(OnError))):
            require(getattr(self, name) in kinds, name, f"must be one of {', '.join(kinds)}")
        require(self.concurrency >= 1, "concurrency", "at least one environment must work")
        require(self.parallel_turns >= 1, "parallel_turns", "an episode needs at least one turn at a time")
        for name in ("reset_timeout", "step_timeout", "deadline"):
            seconds = getattr(self, name)
            require(seconds is None or seconds > 0, name, "must be positive seconds, or None for no limit")
        for name in ("max_retries", "retry_delay", "max_restarts"):
            require(getattr(self, name) >= 0, name, "must not be negative")


def _whole(value: Any, least: int) -> bool:
    # True is an int in Python, and would count as 1.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
