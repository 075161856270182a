from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Capacity, Group, Prompt, RolloutBatch, SamplingParams, StreamEngine
from april.rollout.admission.auto import EFFORT, FEWEST, PROBE, SECONDS_PER_FIT, SECONDS_PER_STEP, AutoAdmission
from april.rollout.admission.choice import PRICE, STALER, SUFFICIENT
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.rates import EngineRates
from april.rollout.batch import Plan
from april.rollout.request_interval import RequestInterval
from april.rollout.sampling import FinishReason
from april.simulation.cost_model import CostModel
from april.simulation.run import simulate
from april.simulation.workload import Part, Workload
from tests.rollout.test_scheduler import scheduler
from tests.scripted_engine import ScriptedEngine

COST = CostModel(
    slots=64,
    kv_tokens=1_000_000,
    decode_batches=(1, 64),
    decode_seconds=(0.010, 0.016),
    kv_token_seconds=2e-8,
    prefill_token_seconds=2e-5,
)
WORKLOAD = Workload("test", (Part(300, 1.0),), 4000, rollout_batch_size=8, n_samples_per_prompt=8)


def engine(slots: int = 8, kv_tokens: int | None = None) -> StreamEngine:
    return StreamEngine(lambda sample: iter(()), Capacity(slots, 1 << 20, kv_tokens))  # type: ignore[arg-type,return-value]


def a_step(rng: np.random.Generator, batch_size: int, group_size: int, budget: int, shortest: int = 1) -> RolloutBatch:
    """A step in which every response got a slot at once and took a second a token."""
    groups = [
        Group.start(i, Prompt((1, 2)), group_size, SamplingParams(max_tokens=budget), 0) for i in range(batch_size)
    ]
    step = RolloutBatch(0, Plan(batch_size), groups)
    for group in groups:
        for sample in group.samples:
            length = int(rng.integers(shortest, budget + 1))
            sample.extend([5] * length, [-1.0] * length, 0, FinishReason.STOP)
            step.request_intervals.append(
                RequestInterval(sample.id, group.id, 0.0, 0, 1.0, 1, 1.0 * length, length, "finished")
            )
    step.seconds, step.sampled_tokens = max(span.end for span in step.request_intervals), step.consumed_tokens
    return step


def learn(admission: AutoAdmission, step: RolloutBatch) -> None:
    spans = [(span.before, span.after, span.outcome == "finished") for span in step.request_intervals]
    step.plan = admission.plan(len(step.groups))
    admission.lengths.observe(*zip(*spans, strict=True))
    admission.lengths.observe_groups([[s.length for s in g.samples] for g in step.groups])
    admission.observe(step)


@given(
    batch_size=st.integers(1, 40),
    group_size=st.integers(1, 4),
    slots=st.integers(1, 200),
    kv_tokens=st.one_of(st.none(), st.integers(100, 10_000)),
    bound=st.one_of(st.none(), st.integers(0, 5)),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_the_choice_is_never_less_than_a_batch_nor_more_than_the_bound_allows(
    batch_size: int, group_size: int, slots: int, kv_tokens: int | None, bound: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    admission = AutoAdmission(engine(slots, kv_tokens), LengthModel(100), group_size, bound)
    for _ in range(5):
        plan = admission.plan(batch_size)
        assert batch_size <= plan.target
        assert bound is None or plan.target <= batch_size * (bound + 1)
        learn(admission, a_step(rng, batch_size, group_size, 100))


def test_it_asks_for_no_more_than_the_engine_needs_to_be_full() -> None:
    """All responses are equally long and the batch fills the slots: more groups in flight would only wait."""
    admission = AutoAdmission(engine(slots=32), LengthModel(50), 4, 5)
    rng = np.random.default_rng(0)
    for _ in range(4):
        learn(admission, a_step(rng, 8, 4, 40, shortest=40))
    assert admission.plan(8).target == 10, "early on, a few more show what resuming costs"
    for _ in range(9):
        learn(admission, a_step(rng, 8, 4, 40, shortest=40))
    assert admission.plan(8).target == 8
    for _ in range(9):
        learn(admission, a_step(rng, 8, 4, 40))
    assert admission.plan(8).target > 8, "of unequal lengths, more under way keep the slots busy"


def test_it_asks_for_more_beyond_a_plateau_while_slots_are_free() -> None:
    """All responses are equally long: groups beyond a batch bring nothing until they are a batch of their own."""
    admission = AutoAdmission(engine(slots=500), LengthModel(50), 4, 3)
    for _ in range(4):
        learn(admission, a_step(np.random.default_rng(0), 8, 4, 40, shortest=40))
    assert admission.plan(8).target >= 16


def test_a_step_that_took_no_time_teaches_nothing() -> None:
    """Enough complete groups were in the buffer: submitted samples were interrupted at once."""
    admission = AutoAdmission(engine(), LengthModel(100), 4, 5)
    learn(admission, a_step(np.random.default_rng(0), 6, 4, 100))
    costs = admission.rates.costs.copy()
    instant = a_step(np.random.default_rng(1), 6, 4, 100)
    for span in instant.request_intervals:
        span.queued = span.end = 0.0
    learn(admission, instant)
    assert (admission.rates.costs == costs).all()


def intervals(rng: np.random.Generator, costs: np.ndarray, scale: float = 1.0) -> list[RequestInterval]:
    """What an engine of these costs, with 8 slots, shows of a step that resumes 2 of 8 samples."""
    spans: list[RequestInterval] = []
    lengths, before = np.sort(rng.integers(20, 200, 8)), np.where(np.arange(8) < 2, 50, 0)
    prefill = costs[4] * 6 * 30 + costs[5] * 2 * (30 + 50)
    seconds, done = prefill, 0
    for i, length in enumerate(lengths.tolist()):
        for at in range(done, length):
            running = 8 - i
            held = running * (30 + at) + before[i:].sum()
            seconds += costs[0] + costs[1] * running + costs[2] * max(running - 4, 0) + costs[3] * held
        done, at_first = length, prefill + costs[0]
        had = int(before[i])
        spans.append(
            RequestInterval(f"{i}.0", i, 0.0, had, at_first * scale, 1, seconds * scale, had + length, "finished")
        )
    return spans


STEADY = np.array([0.01, 0, 0, 0, 0, 0, 0])
COSTS = st.tuples(*[st.floats(0, 1)] * 5)


@given(COSTS, st.integers(0, 1000), st.floats(0, 1e-4))
@settings(max_examples=40, deadline=None)
def test_costs_are_never_negative_and_a_step_without_duration_changes_none(
    some: tuple[float, ...], seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    rates = EngineRates()
    most = (1e-3, 2e-3, 1e-5, 1e-4, 1e-4, 0)
    costs = np.array([0.01, *(share * cost for share, cost in zip((*some, 0.0), most, strict=True))])
    for _ in range(3):
        rates.observe(intervals(rng, costs), 30, Capacity(8, 1 << 20))
        assert (rates.costs >= 0).all()
    known = rates.costs.copy()
    work = (100, 600, 100, 40_000, 300, 200, 0)
    assert rates.seconds(*work) == pytest.approx(float(costs @ work), rel=0.15)
    rates.observe(intervals(rng, 7 * costs, scale), 30, Capacity(8, 1 << 20))
    assert (rates.costs >= 0).all()
    # Costs are seven times as high there: would it count, the estimate would be several times as long.
    assert rates.seconds(*work) == pytest.approx(float(known @ work), rel=0.02)


def test_replicas_that_are_not_equally_fast_count_alike() -> None:
    rates = EngineRates()
    for seed in range(3):
        fast = intervals(np.random.default_rng(seed), STEADY)
        slow = intervals(np.random.default_rng(seed + 10), 1.2 * STEADY)
        rates.observe(sorted(fast + slow, key=lambda span: span.group_id), 30, Capacity(16, 1 << 20))
    work = (100, 1200, 0, 80_000, 600, 400)
    assert rates.seconds(*work) == pytest.approx(1.1 * STEADY[0] * 100, rel=0.02)


def test_a_turn_within_a_step_needs_no_prefill_of_the_earlier_turns() -> None:
    """The engine keeps an episode's KV cache while the environment answers, so only the first requests of a step, two
    of which resume an episode of an earlier step, prefill what their samples have."""
    costs, rates = np.array([0.01, 0, 0, 0, 1e-3, 1e-3, 0]), EngineRates()
    for seed in range(3):
        spans: list[RequestInterval] = []
        for span in intervals(np.random.default_rng(seed), costs):
            assert span.queued is not None
            middle = span.before + (span.after - span.before) // 2
            prefill = span.queued - costs[0]
            until = prefill + costs[0] * (middle - span.before)
            turn = replace(span, after=middle, end=until, outcome="turn")
            rest = replace(span, start=until, before=middle, queued=costs[0], end=span.end)
            spans += [turn, rest]
        rates.observe(sorted(spans, key=lambda span: span.start), 30, Capacity(8, 1 << 20))
    assert rates.seconds(100, 600, 0, 40_000, 0, 0) == pytest.approx(1.0, rel=0.05), "100 decode steps"
    assert rates.seconds(0, 0, 0, 0, 0, 100) == pytest.approx(0.1, rel=0.3), "100 resumed tokens"


def test_a_planner_that_fails_leaves_the_plan_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    admission = AutoAdmission(engine(), LengthModel(100), 2, 5)
    for _ in range(5):
        learn(admission, a_step(rng, 4, 2, 100))
    plan, steps = admission.plan(4), admission.observed.steps
    admission._planned = failed_plan()
    learn(admission, a_step(rng, 4, 2, 100))
    assert (admission.plan(4), admission.observed.steps) == (plan, steps + 1)
    assert "planning failed" in caplog.text
    admission._planned = failed_plan()
    assert admission.state_dict()["planned"] is None


async def test_a_planner_that_fails_costs_no_batch() -> None:
    rollouts = scheduler(ScriptedEngine(), over_sampling_batch_size="auto")
    admission = rollouts.state.admission
    assert isinstance(admission, AutoAdmission)
    async with rollouts:
        admission._planned = failed_plan()
        batch = await rollouts.next_batch()
        assert len(batch.groups) == 3
        assert rollouts.trainer_version == 1
        await rollouts.update_weights()
        assert len((await rollouts.next_batch()).groups) == 3


def failed_plan() -> Future[Plan]:
    failed: Future[Plan] = Future()
    failed.set_exception(MemoryError("planning"))
    return failed


def test_what_it_learned_is_saved_and_restored() -> None:
    rng = np.random.default_rng(0)
    one = AutoAdmission(engine(), LengthModel(100), 4, 5)
    two = AutoAdmission(engine(), LengthModel(100), 4, 5)
    for _ in range(5):
        one.plan(6)
        learn(one, a_step(rng, 6, 4, 100))
    saved = json.loads(json.dumps(one.state_dict()))
    for forecast in saved["forecasts"]:
        forecast.update(occupancy=0.5, saturated=False)  # fields of earlier versions
    two.load_state_dict(saved)
    assert one.plan(6) == two.plan(6)
    two.lengths.load_state_dict(json.loads(json.dumps(one.lengths.state_dict())))
    assert two.current == one.current
    step = a_step(rng, 6, 4, 100)
    learn(one, step)
    learn(two, step)
    assert one.plan(6) == two.plan(6)


def test_the_plan_shows_its_alternatives_and_is_the_freshest_of_those_fast_enough() -> None:
    admission = AutoAdmission(engine(16), LengthModel(100), 4, 5)
    for _ in range(4):
        learn(admission, a_step(np.random.default_rng(0), 6, 4, 100))
    plan = admission.plan(6)
    worth = {one: one.consumed_tokens_per_second * (1 - PRICE * one.staleness) for one in plan.alternatives}
    enough = [one for one in worth if worth[one] >= 0.999 * SUFFICIENT * max(worth.values())]
    chosen = next(one for one in plan.alternatives if one.target == plan.target)
    assert chosen in enough
    assert chosen.staleness <= min(one.staleness for one in enough) + STALER
    assert Plan(**json.loads(json.dumps(asdict(plan)))) == plan


def test_beyond_twice_the_batch_a_measurement_has_to_confirm_the_forecast() -> None:
    """Steps as long as forecast let N' grow by half; steps four times as long do not."""
    for slower, grows in ((1, True), (4, False)):
        admission = AutoAdmission(engine(64), LengthModel(100), 4, 5)
        for number in range(20):
            step = a_step(np.random.default_rng(number), 6, 4, 100)
            expected = admission.current and admission.current.consumed_tokens_per_second
            if expected:
                step.seconds = slower * step.consumed_tokens / expected
            learn(admission, step)
            assert admission.plan(6).target <= 12 or admission.observed.proven >= 12
        assert (admission.plan(6).target > 12) is grows
        assert grows or "until measurements confirm the forecast" in admission.plan(6).reason


def test_it_never_stays_at_a_batch_without_trying_a_few_more() -> None:
    """All responses are equally long, so more groups in flight gain nothing; but only resuming some can show it."""
    admission = AutoAdmission(engine(slots=32), LengthModel(50), 4, 5)
    targets = []
    for i in range(24):
        targets.append(admission.plan(8).target)
        learn(admission, a_step(np.random.default_rng(i), 8, 4, 40, shortest=40))
    assert targets.count(8) > 8
    assert {8, 10} <= set(targets[12:])
    synchronous = AutoAdmission(engine(slots=32), LengthModel(50), 4, 0)
    for i in range(12):
        learn(synchronous, a_step(np.random.default_rng(i), 8, 4, 40, shortest=40))
        assert synchronous.plan(8).target == 8


def test_probes_that_change_nothing_get_rarer_and_take_one_step_each() -> None:
    admission = AutoAdmission(engine(slots=32), LengthModel(50), 4, 5)
    probes = []
    for i in range(76):
        plan = admission.plan(8)
        if plan.reason == PROBE:
            probes.append(i)
        learn(admission, a_step(np.random.default_rng(i), 8, 4, 40, shortest=40))
    assert np.diff(probes).tolist() == [17, 33], "8, 16 and 32 steps without, and the one of the probe"


def test_a_preempted_response_is_not_taken_for_a_cost_of_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls behind those that decode on. When that was seen as slow resuming, N' stayed close to N."""
    resumed: list[float] = []
    observe = EngineRates.observe
    monkeypatch.setattr(EngineRates, "observe", lambda one, *of: (observe(one, *of), resumed.append(one.costs[5])))
    cost = replace(COST, slots=48, kv_tokens=8_000)
    simulate(WORKLOAD, cost, steps=14, on_update="keep", over_sampling_batch_size="auto")
    assert float(np.median(resumed[5:])) < 3 * cost.prefill_token_seconds


def test_a_trainer_that_is_the_slower_side_is_given_fresher_data() -> None:
    """With a trainer that takes longer than generation, more groups in flight add only staleness."""
    targets = []
    for training_seconds in (0.0, 10_000.0):
        admission = AutoAdmission(engine(), LengthModel(100), 4, 5)
        for _ in range(12):
            step = a_step(np.random.default_rng(0), 6, 4, 100)
            if training_seconds:
                step.interrupted_at = step.resumed_at = step.seconds = training_seconds
            learn(admission, step)
        targets.append(admission.plan(6).target)
    assert targets[1] <= 7 < targets[0]


@pytest.mark.parametrize(("seconds", "steps"), [(0.02, 300), (0.1, 200), (0.4, 50)])
def test_learning_and_planning_take_no_more_than_their_part_of_short_steps(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in forecasts and steps learned from, at what these take; the first plan is made on credit."""
    lessons, spent = [], []
    observe = EngineRates.observe
    monkeypatch.setattr(EngineRates, "observe", lambda *args: (lessons.append(args), observe(*args)))
    admission = AutoAdmission(engine(), LengthModel(100), 4, 5)
    for i in range(steps):
        step = a_step(np.random.default_rng(i), 6, 4, 100)
        step.seconds = seconds
        before = admission.plan(6)
        learn(admission, step)
        if admission.plan(6) is not before:
            spent.append(len(admission.plan(6).alternatives) * FEWEST * SECONDS_PER_STEP)
    later = spent[1:]
    assert len(lessons) * SECONDS_PER_FIT + sum(later) <= steps * seconds * EFFORT
    assert later or seconds < 0.1, "it plans again"
    assert len(lessons) > steps // 8, "it goes on learning"


@pytest.mark.parametrize(("ratio", "kv_tokens"), [(1.5, 1_000_000), (2.5, 1_000_000), (1.5, 12_000)])
def test_the_forecast_agrees_with_the_simulated_engine(ratio: float, kv_tokens: int) -> None:
    """From the request intervals of a run alone, it predicts the throughput of that run and of others, also
    where the KV cache holds half of what decodes and samples are preempted."""
    cost = replace(COST, kv_tokens=kv_tokens, prefill_token_seconds=COST.prefill_token_seconds * 10)
    learned: list[AutoAdmission] = []

    class Watching(AutoAdmission):
        def __init__(self) -> None:
            super().__init__(engine(64, kv_tokens), LengthModel(4000), 8, 5)
            learned.append(self)

        def plan(self, batch_size: int) -> Plan:
            return Plan(round(ratio * batch_size))

        def observe(self, step: RolloutBatch) -> None:
            super().observe(step)
            spans = [(span.before, span.after, span.outcome == "finished") for span in step.request_intervals]
            self.lengths.observe(*zip(*spans, strict=True) if spans else ((), (), ()))
            self.lengths.observe_groups([[s.length for s in g.samples] for g in step.groups])

    simulate(WORKLOAD, cost, steps=25, over_sampling_batch_size=Watching())
    workload, _, steps = learned[0]._conditions(8, learned[0].lengths)
    truth = {n: simulate(WORKLOAD, cost, steps=40, over_sampling_batch_size=n) for n in (12, 16, 24)}
    forecast = {n: workload.forecast(n, steps, steps // 3) for n in truth}
    for n, expected in forecast.items():
        got = truth[n].consumed_tokens_per_second
        assert expected.consumed_tokens_per_second == pytest.approx(got, rel=0.2), "lengths of 25 steps of 8 prompts"
        assert expected.staleness == pytest.approx(truth[n].mean_staleness, abs=0.25)
        gain = expected.consumed_tokens_per_second / forecast[24].consumed_tokens_per_second
        assert gain == pytest.approx(got / truth[24].consumed_tokens_per_second, rel=0.1), "what the choice rests on"


def test_no_long_answer_is_left_out_and_no_prompt_starves() -> None:
    """What partial rollouts train on has the same lengths as in a synchronous run with the same number of steps."""
    steps, bound = 60, 3
    run = simulate(WORKLOAD, COST, steps=steps, warm_up=0, over_sampling_batch_size="auto", max_staleness=bound)
    synchronous = simulate(WORKLOAD, COST, steps=steps, warm_up=0, partial_rollout=False)
    assert distance(run.lengths, synchronous.lengths) < 0.02
    assert run.max_staleness <= bound
    early = np.concatenate([step.lengths for step in run.steps[:2]])
    assert distance(early, synchronous.lengths) > 0.03, "the first steps do lack the long ones; the run makes up for it"


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distribution functions."""
    at = np.unique(np.concatenate((one, two)))
    below = [np.searchsorted(np.sort(values), at, "right") / len(values) for values in (one, two)]
    return float(np.abs(below[0] - below[1]).max())
