"""Admission that tunes itself: the smallest N' expected to come close to the best throughput that the bound allows.

More groups under way keep the engine fuller and make what is trained on staler, so throughput alone would always ask
for more. What lengths and engine would make of each N' is forecast (`forecast.py`) from the lengths learned so far
(`lengths.py`) and the engine's costs (`rates.py`), both followed as they drift. Nothing needs to be set.

Invariant: N <= N' <= N * (max_staleness + 1), whatever was observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from april.rollout.admission.admission import largest_target
from april.rollout.admission.forecast import Forecast, Workload
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.rates import EngineRates
from april.rollout.engine import Engine
from april.rollout.step import Plan, Step

UNBOUNDED = 8
"""The largest N'/N that is considered where no staleness bound limits it."""
SAMPLES = 512
"""Samples of a batch in a forecast; a larger batch is scaled down, slots and all, since only proportions matter."""


class AutoAdmission:
    """Chooses N' from what is observed.

    Args:
        engine: its capacity limits how many samples decode together.
        lengths: the length model, kept up to date by the scheduler.
        group_size: samples in a group.
        max_staleness: the bound; None for no bound.
        share: the part of the best forecast throughput that is enough.
    """

    def __init__(
        self, engine: Engine, lengths: LengthModel, group_size: int, max_staleness: int | None, share: float = 0.98
    ) -> None:
        self.engine = engine
        self.lengths = lengths
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.share = share
        self.rates = EngineRates()
        self.prompt_tokens = 0.0
        self.accepted = 1.0
        self.steps = 0
        self.current: Plan | None = None

    def plan(self, batch_size: int) -> Plan:
        largest = largest_target(batch_size, self.max_staleness) or UNBOUNDED * batch_size
        if not self.rates.known:
            return Plan(min(2 * batch_size, largest), "twice the batch, until a step was seen")
        if self.current is None or self._due():
            self.current = self._choose(batch_size, largest)
        return self.current

    def _due(self) -> bool:
        """Every step at first, then every fourth: lengths drift slowly, and a decision takes time."""
        return self.steps <= 4 or self.steps % 4 == 0

    def observe(self, step: Step) -> None:
        prompts = [len(group.prompt.token_ids) for group in step.groups]
        self.prompt_tokens += (float(np.mean(prompts)) - self.prompt_tokens) / (4 if self.steps else 1)
        accepted = len(step.groups) / (len(step.groups) + len(step.rejections))
        self.accepted += (accepted - self.accepted) / (4 if self.steps else 1)
        self.rates.observe(step.spans, self.prompt_tokens, self.engine.capacity.slots)
        self.steps += 1

    def _choose(self, batch_size: int, largest: int) -> Plan:
        played: dict[int, Forecast] = {}
        workload, scale, steps = self._workload(batch_size)

        def rate(target: int) -> float:
            if target not in played:
                # A group that is turned away is replaced: the step has to complete more, with as many more under way.
                under_way = round((target - batch_size) * scale) + workload.batch_size
                played[target] = workload.forecast(under_way, steps, steps // 3)
            return played[target].consumed_tokens_per_second

        ladder = np.unique(np.round(np.geomspace(batch_size, largest, 10)).astype(int)).tolist()
        best, flat = 0.0, 0
        for target in ladder:
            flat = 0 if rate(target) > 1.005 * best else flat + 1
            best = max(best, rate(target))
            if flat == 2 and target * self.group_size >= self.engine.capacity.slots:
                break  # more groups under way only wait
        enough = self.share * best
        high = next(target for target in ladder if rate(target) >= enough)
        low = max([target for target in ladder if target < high], default=high)
        while high - low > max(1, batch_size // 16):
            middle = (low + high) // 2
            if rate(middle) >= enough:
                high = middle
            else:
                low = middle
        now = self.current.target if self.current else high
        if high < now <= 1.25 * high and rate(now) >= enough:
            high = now  # as good: differences this small come and go with the estimates
        per_second = self.accepted / scale
        expected, chosen = rate(high) * per_second, played[high]
        reason = (
            f"the smallest N' expected to reach {self.share:.0%} of the best that the bound allows: {expected:,.0f} of "
            f"{best * per_second:,.0f} consumed tokens/s; engine {chosen.occupancy:.0%} full, mean response "
            f"{self.lengths.mean:,.0f} tokens"
        )
        return Plan(high, reason, expected, chosen.staleness)

    def _workload(self, batch_size: int) -> tuple[Workload, float, int]:
        """What a forecast plays with, by how much it is scaled, and for how many steps."""
        needed = batch_size / max(self.accepted, 0.05)
        scale = min(1.0, SAMPLES / (needed * self.group_size))
        groups = max(round(needed * scale), 1)
        steps = min(max(768 // groups, 36), 96)
        capacity = self.engine.capacity
        rng = np.random.default_rng(0)  # the same draws for every N': differences are not noise
        lengths = self.lengths.draw(groups * (steps + 6), self.group_size, rng, even=16 * groups)
        rates = EngineRates()
        rates.costs = self.rates.costs / [1.0, *[scale] * (len(self.rates.costs) - 1)]
        kv_tokens = None if capacity.kv_tokens is None else capacity.kv_tokens * scale
        slots = max(round(capacity.slots * scale), 1)
        bound, prompt = self.max_staleness, self.prompt_tokens
        return Workload(lengths, groups, slots, kv_tokens, bound, prompt, rates), scale, steps

    def state_dict(self) -> dict[str, Any]:
        plan = self.current
        return {
            "rates": self.rates.state_dict(),
            "prompt_tokens": self.prompt_tokens,
            "accepted": self.accepted,
            "steps": self.steps,
            "plan": plan and [plan.target, plan.reason, plan.consumed_tokens_per_second, plan.staleness],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return  # a run that goes on with N' chosen for it, and had it set before
        self.rates.load_state_dict(state["rates"])
        self.prompt_tokens, self.accepted, self.steps = state["prompt_tokens"], state["accepted"], state["steps"]
        self.current = Plan(*state["plan"]) if state["plan"] else None
