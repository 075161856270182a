from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Group, Prompt, SamplingParams
from april.rollout.admission.lengths import LengthModel
from april.rollout.order import ORDERS
from april.rollout.sampling import FinishReason

BUDGET = 400


def lengths() -> LengthModel:
    """Lengths with a tail that is heavier the further out one is."""
    rng = np.random.default_rng(0)
    seen = np.clip(np.ceil(30 * np.exp(1.2 * rng.standard_normal(4000))), 1, BUDGET)
    model = LengthModel(BUDGET)
    model.observe(np.zeros(4000), seen, np.full(4000, True))
    return model


def group(id: int, samples: list[tuple[int, bool]]) -> Group:
    made = Group.start(id, Prompt((1,)), len(samples), SamplingParams(max_tokens=BUDGET), seed=0)
    for sample, (length, done) in zip(made.samples, samples, strict=True):
        sample.extend([5] * length, [-1.0] * length, 0, FinishReason.STOP if done else None)
    return made


GROUPS = st.lists(st.lists(st.tuples(st.integers(1, BUDGET - 1), st.booleans()), min_size=3, max_size=3), max_size=8)


@pytest.mark.parametrize("name", ORDERS)
@given(GROUPS)
@settings(deadline=None)
def test_an_order_has_every_unfinished_sample_once(name: str, shapes: list[list[tuple[int, bool]]]) -> None:
    groups = [group(i, shape) for i, shape in enumerate(shapes)]
    work = ORDERS[name](groups, lengths())
    assert sorted(s.id for s in work) == sorted(s.id for g in groups for s in g.samples if s.finish is None)


def first(name: str, *groups: Group) -> str:
    return ORDERS[name](groups, lengths())[0].id


def test_each_order_puts_first_what_its_name_says() -> None:
    begun = group(0, [(300, False), (20, True), (200, False)])
    nearly = group(1, [(5, True), (8, True), (4, False)])
    fresh = group(2, [(1, False), (1, False), (1, False)])
    assert first("oldest", begun, nearly, fresh) == "0.0"
    assert first("most-complete", begun, nearly, fresh) == "1.2"
    assert first("nearest", begun, fresh, nearly) == "1.2"
    assert first("shortest", begun, fresh, nearly) == "1.2"
    assert first("longest", nearly, fresh, begun).startswith("0.")
