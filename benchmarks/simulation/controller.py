"""A feedback controller of N': it compares neighbouring values of N' and keeps the better one.

The study in docs/reports/controller.md compares it with automatic N', which stayed. N'/N is a rung of a ladder that
ends at the largest N' of the staleness bound. The controller measures its rung over a few steps. It then tries another
rung for as many steps:

- the next higher rung if slots of the engine were idle, that is, if no sample was in flight for them;
- the next lower rung if hardly any slot was idle, because queued samples or a full KV cache limit the engine, or if a
  trainer that trains during generation hardly ever waited, because then the trainer limits the run.

A rung is worth the logarithm of its sampled tokens per second, minus a price for staleness, which grows with N'. If the
trial is worth more, its rung becomes the new one, and the next trial follows at once. Otherwise the controller returns,
and pauses before the next trial; each failure doubles the pause. Sampled tokens are counted because they vary less than
consumed tokens, and no sampled token is discarded.

Decisions depend on the recorded batches only, so a replay of the batches repeats the decisions.

Invariants:
- N <= N' <= N * (max_staleness + 1);
- N' is constant during a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from april.rollout.admission.admission import largest_target
from april.rollout.batch import Plan, RolloutBatch

RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Rungs below the largest one. Neighbours differ by more than the noise of a measurement hides."""
UNBOUNDED = 8.0
"""Largest N'/N without a staleness bound."""
START = 2.0
SCANNED = (1.25, 2.0, 3.0)
"""Rungs of a scan, before the largest one."""
PRICE = 0.02
"""Share of the throughput that one more batch in flight has to gain. It adds about one version of staleness."""
STEPS, SAMPLES = 3, 256
"""Smallest number of steps and of consumed samples of a measurement."""
SETTLE = 1
"""Steps after a change of N' that are not measured."""
IDLE, BUSY = 0.05, 0.03
"""Share of idle slots above which a higher rung is tried, and below which a lower one is tried."""
NONE_IDLE = 0.01
"""Share of idle slots below which a lower rung is kept without a comparison: fewer groups in flight cost nothing."""
WAITING = 0.05
"""Share of the time that an overlapping trainer waits for rollouts, below which the trainer limits the run."""
PAUSE, LONGEST_PAUSE = 2, 16
"""Measurements between trials after the first failure in a row, and after many."""


def step_seconds(step: RolloutBatch) -> float:
    """Return the duration of a step that N' can change: the rollouts, and the weight update.

    With overlap, `seconds` contains the update and the training. Without overlap, the training time is left out: each
    step trains on N groups for any N'.
    """
    before = step.update_seconds if step.resumed_at is None else None
    return step.seconds + (before or 0.0)


@dataclass(slots=True)
class Measurement:
    """Sums over successive steps with the same N'; JSON types."""

    steps: int = 0
    samples: int = 0
    """Consumed samples."""
    tokens: int = 0
    """Sampled tokens."""
    seconds: float = 0.0
    idle: float = 0.0
    """Seconds times the share of idle slots."""
    waited: float = 0.0
    """Seconds in which a trainer could not train."""

    def add(self, step: RolloutBatch) -> None:
        self.steps += 1
        self.samples += sum(len(group.samples) for group in step.groups)
        self.tokens += step.sampled_tokens
        self.seconds += step_seconds(step)
        self.idle += step.idle_slots * step.seconds
        self.waited += step.seconds - (step.resumed_at or 0.0)

    @property
    def complete(self) -> bool:
        # Steps that only return surplus groups sample nothing, and may take no time at all.
        enough = self.steps >= STEPS and self.samples >= SAMPLES
        return enough and self.tokens > 0 and self.seconds > 0

    @property
    def idle_share(self) -> float:
        """Share of idle slots; 0 if the trainer limits the run, because then idle slots cost nothing."""
        return 0.0 if self.waited < WAITING * self.seconds else self.idle / self.seconds

    def worth(self, ratio: float) -> float:
        return log(self.tokens / self.seconds) - PRICE * ratio


@dataclass(slots=True)
class Climb:
    """State of the controller; JSON types."""

    home: float = START
    """Best N'/N so far."""
    worth: float | None = None
    """Mean worth of `home`; None before its first measurement."""
    trial: float | None = None
    """N'/N that is tried."""
    settling: int = SETTLE
    """Steps to leave out before the next measurement."""
    waiting: int = 0
    """Measurements of `home` until the next trial."""
    pause: int = PAUSE
    """`waiting` after the next trial that fails."""
    scan: list[list[float]] | None = None
    """N'/N and worth of the rungs of a scan so far; None without a scan."""
    lower_is_worse: bool = False
    """The rung below was measured and is worth less."""
    overlap: bool = False
    """Generation has continued during training."""
    measurement: dict[str, Any] = field(default_factory=dict)
    """The unfinished measurement."""


class Controller:
    """Chooses N' from observed steps.

    Args:
        max_staleness: staleness bound; None for no bound.
        try_below: after a failed trial of a higher rung, try the lower one unless it is known to be worth less.
        scan: begin with the smallest rung, climb while slots are idle, and go to the best rung.
    """

    def __init__(self, max_staleness: int | None, try_below: bool = False, scan: bool = False) -> None:
        self.max_staleness = max_staleness
        self.try_below = try_below
        self.state = Climb(home=SCANNED[0], scan=[]) if scan else Climb()
        self._measured = Measurement()

    def plan(self, batch_size: int) -> Plan:
        state = self.state
        ratio = min(state.home if state.trial is None else state.trial, self._rungs[-1])
        largest = largest_target(batch_size, self.max_staleness)
        target = max(round(ratio * batch_size), batch_size)
        target = target if largest is None else min(target, largest)
        if state.trial is not None:
            return Plan(target, f"trial of {ratio:g} N against {state.home:g} N")
        return Plan(target, f"{ratio:g} N: the best measured so far" if state.worth is not None else "start")

    def observe(self, step: RolloutBatch) -> None:
        state = self.state
        state.overlap |= step.resumed_at is not None
        if state.settling:
            state.settling -= 1
            return
        self._measured.add(step)
        if self._measured.complete:
            measured, self._measured = self._measured, Measurement()
            if state.trial is None:
                self._at_home(measured)
            else:
                self._after_trial(state.trial, measured)

    def _at_home(self, measured: Measurement) -> None:
        state, worth = self.state, measured.worth(self.state.home)
        if state.scan is not None:
            self._scan(state.scan, worth, measured.idle_share)
            return
        state.worth = worth if state.worth is None else (state.worth + worth) / 2
        if state.waiting:
            state.waiting -= 1
        else:
            self._try(self._wanted(measured.idle_share))

    def _scan(self, scan: list[list[float]], worth: float, idle: float) -> None:
        """Climb the coarse ladder while slots are idle, then return to the best rung."""
        state = self.state
        scan.append([state.home, worth])
        higher = [
            ratio for ratio in self._rungs if ratio > state.home and (ratio in SCANNED or ratio == self._rungs[-1])
        ]
        if idle > IDLE and higher:
            state.home, state.settling = higher[0], SETTLE
            return
        best, state.worth = max(scan, key=lambda one: one[1])
        state.settling = SETTLE + round(max(state.home - best, 0))
        state.home, state.scan, state.waiting = best, None, PAUSE
        state.lower_is_worse = best > scan[0][0]

    def _after_trial(self, trial: float, measured: Measurement) -> None:
        state, worth, idle = self.state, measured.worth(trial), measured.idle_share
        assert state.worth is not None, "a trial follows a measurement"
        up = trial > state.home
        if worth > state.worth or (not up and idle < NONE_IDLE):
            state.home, state.worth, state.trial, state.pause = trial, worth, None, PAUSE
            state.lower_is_worse = up
            self._try(self._wanted(idle))
        else:
            state.trial, state.settling = None, SETTLE
            if up and self.try_below and not state.lower_is_worse:
                self._try(self._rung(-1))
                return
            state.lower_is_worse = not up
            state.waiting, state.pause = state.pause, min(2 * state.pause, LONGEST_PAUSE)

    def _wanted(self, idle: float) -> float:
        """Return the rung to try, given the share of idle slots; the present one for no trial."""
        if idle > IDLE:
            return self._rung(1)
        return self._rung(-1) if idle < BUSY else self.state.home

    def _rung(self, by: int) -> float:
        rungs = self._rungs
        here = min(range(len(rungs)), key=lambda i: abs(rungs[i] - self.state.home))
        return rungs[max(min(here + by, len(rungs) - 1), 0)]

    def _try(self, ratio: float) -> None:
        if ratio != self.state.home:
            self.state.trial, self.state.settling = ratio, SETTLE

    @property
    def _rungs(self) -> list[float]:
        largest = UNBOUNDED if self.max_staleness is None else self.max_staleness + 1.0
        # With overlap, N' = N makes the trainer wait for the slowest sample of each batch: too costly for a trial.
        least = 1.25 if self.state.overlap else 1.0
        return [*(ratio for ratio in RATIOS if least <= ratio < largest), largest]

    def state_dict(self) -> dict[str, Any]:
        return {"climb": {**asdict(self.state), "measurement": asdict(self._measured)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "climb" not in state:
            return  # a resumed run that had a fixed N' before
        self.state = Climb(**state["climb"])
        self._measured = Measurement(**self.state.measurement)
