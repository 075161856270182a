"""Automatic admission: the freshest data whose throughput is close to the best that the staleness bound allows.

With more groups in flight the engine is fuller and the training data staler, so throughput alone would always favour
more. The throughput and staleness of each N' are forecast (`forecast.py`) from the response lengths (`lengths.py`) and
the engine's costs (`rates.py`) learned so far, both of which follow drift. No setting is needed.

Planning runs in a separate thread, concurrently with training and the next step; the step after that follows the plan.
So no step waits for a plan.

Invariants:
- learning and planning take at most 1 % of the duration of steps, by their own estimate; only the first plan may exceed
  this budget;
- N <= N' <= N * (max_staleness + 1) for all observations;
- N' > 2 N only after the throughput measured at two thirds of it was close to its forecast;
- a planner that fails changes no plan, and fails no step;
- the plan depends only on the observed steps, so a replay of the steps gives the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from april.rollout.admission.admission import largest_target
from april.rollout.admission.choice import Choice, Means, ladder
from april.rollout.admission.forecast import Conditions, Forecast
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.rates import EngineRates
from april.rollout.admission.recent_steps import RecentSteps
from april.rollout.batch import Alternative, Plan, RolloutBatch
from april.rollout.engine import Engine

log = logging.getLogger(__name__)

UNBOUNDED = 8
"""Largest N'/N that is considered without a staleness bound."""
SAMPLES = 512
"""Samples of a batch in a forecast; a larger batch and its slots are scaled down, as only proportions matter."""
CANDIDATES = 13
FIRST = 3
"""Steps until the first plan: a single step may have been slow, or have included start-up costs."""
EARLY, EARLY_CANDIDATES = 8, 7
"""First steps, in which plans try fewer N', so that plans are frequent. No plan is N' = N: then no sample is resumed,
and a wrong first estimate would never be corrected."""
FEWEST = 18
"""Fewest steps that a forecast simulates."""
EFFORT = 0.01
"""Share of the steps' time that learning and planning may take."""
SECONDS_PER_STEP, SECONDS_PER_SAMPLE = 1.2e-4, 1.1e-6
"""Approximate time to simulate a step of a forecast. Not measured: plans must not depend on the machine's load."""
SECONDS_PER_FIT, SECONDS_PER_REQUEST = 6e-4, 3e-6
"""Approximate time to learn from a step."""
PREEMPTION_SAMPLE, PREEMPTION_REQUEST = 14, 2.5
"""Factors of these times per sample and per request if the KV cache may not hold all samples that decode."""
PATIENCE, DOUBLINGS = 8, 3
"""Steps at N' = N, in which no sample is resumed and little is learned, after which a slightly larger N' is tried. Each
trial without effect doubles this number, up to `DOUBLINGS` times."""

PROBE = "a few more groups than a batch for one step, to measure the cost of resuming"


class AutoAdmission:
    """Chooses N' from observed steps.

    Args:
        engine: its capacity limits the number of samples that decode together.
        lengths: the length model, updated by the scheduler.
        group_size: samples in a group.
        max_staleness: staleness bound; None for no bound.
    """

    def __init__(
        self,
        engine: Engine,
        lengths: LengthModel,
        group_size: int,
        max_staleness: int | None,
    ) -> None:
        self.engine = engine
        self.lengths = lengths
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.rates = EngineRates()
        self.current: Plan | None = None
        self.observed = RecentSteps()
        self._means = Means()
        self._planner = ThreadPoolExecutor(1, "april-admission")
        self._planned: Future[Plan] | None = None

    def plan(self, batch_size: int) -> Plan:
        if self.observed.probing:
            return Plan(self._few_more(batch_size), PROBE)
        twice = min(2 * batch_size, self._largest(batch_size))
        return self.current or Plan(twice, f"twice the batch, until {FIRST} steps were observed")

    def observe(self, step: RolloutBatch) -> None:
        # It started a step ago: plans are taken one step after their start even if they were ready earlier, as they
        # must not depend on the machine's speed.
        plan = self._result()
        self._planned = None
        batch_size, probed = len(step.groups), self.observed.probing
        prompts = [len(group.prompt.token_ids) for group in step.groups]
        self.observed.add(step, float(np.mean(prompts)), self.engine.capacity.slots)
        if self.current is not None:
            self.observed.compare(self.current)
        self.current = plan or self.current
        self.observed.budget += EFFORT * step.seconds
        each = SECONDS_PER_REQUEST * (PREEMPTION_REQUEST if self._may_preempt(batch_size) else 1)
        for requests in step.requests_by_update:
            fit = SECONDS_PER_FIT + each * len(requests)
            if self.observed.budget >= fit or self.current is None:
                self.observed.budget -= fit
                self.rates.observe(requests, self.observed.prompt_tokens, self.engine.capacity)
        if not self.rates.costs.any():
            return
        prompt_tokens = self.observed.prompt_tokens
        prefill = sum(self.rates.resumed_seconds(one, prompt_tokens) for one in step.requests_by_update)
        self.observed.add_resumed_prefill(prefill, step.seconds)
        if self.observed.synchronous >= PATIENCE * 2 ** min(self.observed.probes, DOUBLINGS):
            self.observed.probe()
        elif self._due(batch_size, probed):
            self.observed.budget -= self._cost(batch_size) * self._steps(batch_size)
            # The thread gets a copy of the lengths, which learn from the next step before this plan is taken.
            self._planned = self._planner.submit(
                self._choose, batch_size, self._trusted(batch_size), deepcopy(self.lengths)
            )

    def _result(self) -> Plan | None:
        """Wait for the plan and return it; None if there is none. A planner that failed must not cost the batch: the
        plan before it stays."""
        try:
            return None if self._planned is None else self._planned.result()
        except Exception:
            log.exception("admission: planning failed; the plan before it stays")
            self._planned = None  # logged once
            return None

    def _largest(self, batch_size: int) -> int:
        return largest_target(batch_size, self.max_staleness) or UNBOUNDED * batch_size

    def _due(self, batch_size: int, probed: bool) -> bool:
        """Whether to plan now: after any early step, then after every fourth, as lengths drift slowly; less often if
        steps are short."""
        if self.current is None:
            return self.observed.steps >= FIRST
        if not self._early and self.observed.steps % 4 and not probed:
            return False
        return self.observed.budget >= self._cost(batch_size) * self._steps(batch_size)

    @property
    def _early(self) -> bool:
        return self.observed.steps <= EARLY

    @property
    def _candidates(self) -> int:
        return EARLY_CANDIDATES if self._early else CANDIDATES

    def _cost(self, batch_size: int) -> float:
        """Return the seconds that planning takes for each simulated step."""
        samples = min(batch_size * self.group_size, SAMPLES)
        each = SECONDS_PER_SAMPLE * (PREEMPTION_SAMPLE if self._may_preempt(batch_size) else 1)
        return (self._candidates + 1) * (SECONDS_PER_STEP + each * samples)

    def _may_preempt(self, batch_size: int) -> bool:
        """Whether the KV cache may not hold all samples that decode at the largest N'."""
        capacity = self.engine.capacity
        most = min(capacity.slots, self._largest(batch_size) * self.group_size)
        held = self.observed.prompt_tokens + self.lengths.mean
        return capacity.kv_tokens is not None and most * held > capacity.kv_tokens

    def _trusted(self, batch_size: int) -> int:
        """Return the largest N' for which forecasts alone suffice: 2 N, or 1.5 times the largest proven N'."""
        return max(2 * batch_size, 3 * self.observed.proven // 2)

    def _few_more(self, batch_size: int) -> int:
        """Return the smallest N' with which some samples are resumed, so that their cost is learned."""
        return min(batch_size + max(batch_size // 4, 1), self._largest(batch_size))

    def _choose(self, batch_size: int, trusted: int, lengths: LengthModel) -> Plan:
        workload, scale, steps = self._conditions(batch_size, lengths)
        per_second = self.observed.accepted / scale

        def forecast(target: int) -> Forecast:
            # A rejected group is replaced: the step must complete more groups, with the same number more in flight.
            in_flight = round((target - batch_size) * scale) + workload.batch_size
            scaled = workload.forecast(in_flight, steps, steps // 3)
            rate = scaled.consumed_tokens_per_second * per_second
            return replace(scaled, target=target, consumed_tokens_per_second=rate)

        rungs = ladder(batch_size, self._largest(batch_size), self._candidates)
        self._means.add({target: forecast(target) for target in rungs})
        choice = Choice(self._means.forecasts, forecast, self._means.plans)
        target = choice.choose(self.current.target if self.current else None)
        if self._early:
            target = max(target, self._few_more(batch_size))
        limited = "" if target <= trusted else f" (limited from {target} until measurements confirm the forecast)"
        chosen = choice.forecast(min(target, trusted))
        expected = chosen.consumed_tokens_per_second
        reason = (
            f"the freshest data close to the best rate within the bound: {expected:,.0f} of "
            f"{choice.best_throughput:,.0f} consumed tokens/s at staleness {chosen.staleness:.2f}; "
            f"mean response {lengths.mean:,.0f} tokens{limited}"
        )
        table = tuple(
            Alternative(n, round(float(one.consumed_tokens_per_second), 1), round(one.staleness, 3))
            for n, one in sorted(choice.forecasts.items())
        )
        prefill = round(self.observed.resumed_prefill, 5)
        return Plan(chosen.target, reason, expected, chosen.staleness, table, prefill)

    def _steps(self, batch_size: int) -> int:
        """Return the number of steps that a forecast simulates, within 1 % of the time of four steps."""
        if self._early:
            return FEWEST
        groups = max(round(min(batch_size, SAMPLES / self.group_size)), 1)
        most = min(max(768 // groups, 36), 96)
        budget = 4 * self.observed.step_seconds * EFFORT / self._cost(batch_size)
        return int(min(max(budget, FEWEST), most))

    def _conditions(self, batch_size: int, lengths: LengthModel) -> tuple[Conditions, float, int]:
        """Return the conditions of a forecast, the factor by which they are scaled, and the number of steps."""
        needed = batch_size / max(self.observed.accepted, 0.05)
        scale = min(1.0, SAMPLES / (needed * self.group_size))
        groups = max(round(needed * scale), 1)
        steps = self._steps(batch_size)
        capacity = self.engine.capacity
        rng = np.random.default_rng(self.observed.steps)  # the same draws for every N', other draws for every plan
        rates = EngineRates()
        # A scaled batch has fewer tokens, so each costs more; the fixed cost of a decode step does not change.
        rates.costs = self.rates.costs / [1.0, *[scale] * (len(self.rates.costs) - 1)]
        conditions = Conditions(
            lengths.draw(groups * (steps + 6), self.group_size, rng, even=16 * groups),
            groups,
            max(round(capacity.slots * scale), 1),
            None if capacity.kv_tokens is None else capacity.kv_tokens * scale,
            self.max_staleness,
            self.observed.prompt_tokens,
            rates,
            self.observed.interrupt_seconds,
            self.observed.update_seconds,
            self.observed.training_seconds,
            self._away(lengths),
        )
        return conditions, scale, steps

    def _away(self, lengths: LengthModel) -> float:
        """Return decode steps that an episode waits for its environment, per decode step of its own."""
        if not self.observed.away_seconds:
            return 0.0
        running, slots = max(self.observed.running, 1.0), self.engine.capacity.slots
        held = running * (self.observed.prompt_tokens + lengths.mean / 2)
        step = self.rates.seconds(1, running, max(running - slots / 2, 0.0), held, 0, 0)
        return self.observed.away_seconds / max(step, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        # Waits for the plan: a resumed run has to use it at the same step.
        planned = self._result()
        return {
            "rates": self.rates.state_dict(),
            "observed": asdict(self.observed),
            "plan": self.current and asdict(self.current),
            "planned": planned and asdict(planned),
            "plans": self._means.plans,
            "forecasts": [asdict(forecast) for forecast in self._means.forecasts.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planned = None
        if "rates" not in state:
            return  # a resumed run that had a fixed N' before
        self.rates.load_state_dict(state["rates"])
        self.observed = RecentSteps(**state["observed"])
        self.current = Plan(**state["plan"]) if state["plan"] else None
        self._means = Means(state["plans"], {saved["target"]: Forecast.restored(saved) for saved in state["forecasts"]})
        if state["planned"]:
            self._planned = Future()
            self._planned.set_result(Plan(**state["planned"]))
