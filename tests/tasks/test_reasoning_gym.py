from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.rollout.trajectory.reward import Reward
from april.tasks.build import build_task
from april.tasks.reasoning_gym import pack, unpack
from april.tasks.task import Problem, TaskSpec

MIXTURE = {"datasets": [{"name": "gcd", "weight": 1, "config": {}}, {"name": "arc_1d", "weight": 1, "config": {}}]}


def gym(name: str = "gcd", **changes) -> TaskSpec:
    return TaskSpec("reasoning_gym", name, **{"size": 50, "eval_size": 10, **changes})


def after_restart(problem: Problem) -> Problem:
    saved = json.loads(json.dumps([problem.prompt, problem.answer, problem.metadata]))
    return Problem(problem.id, *saved)


# gcd: the quickstart. The others each break something that gcd does not: tuples in the metadata, answers that are None,
# scorers that raise on bad answers, entries made in advance, indices that are bounded, datasets made of datasets.
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gcd", {"max_value": 99}),
        ("chain_sum", {}),
        ("rearc", {}),
        ("graph_color", {}),
        ("prime_factorization", {}),
        ("gsm_symbolic", {}),
        ("word_ladder", {}),
        ("list_functions", {}),
        ("composite", MIXTURE),
    ],
)
def test_any_dataset_is_scored_by_its_scorer_also_after_a_restart(name, params):
    task = build_task(gym(name, params=params, eval_size=3))
    for index in range(3):
        entry, problem = task.eval_data[index], task.problem(index, "eval")
        assert problem.prompt == entry["question"]
        for answer in (entry["answer"], "17", "nonsense", ""):
            try:
                expected = task.eval_data.score_answer(answer, entry)
            except (TypeError, ValueError):
                expected = 0.0
            if answer is not None:
                response = f"<answer>1</answer> no: <answer>{answer}</answer>"
                assert task.score(after_restart(problem), response) == expected
        assert task.score(problem, f"the answer is {entry['answer']}") == 0.0


def test_right_and_wrong_answers_to_gcd():
    task = build_task(gym())
    problem = task.problem(4)
    numbers = [int(n) for n in problem.prompt.split(": ")[1].split(".")[0].split(", ")]
    assert task.score(problem, f"<answer>{math.gcd(*numbers)}</answer>") == 1.0
    assert task.score(problem, f"<answer>{math.gcd(*numbers) + 1}</answer>") == 0.0


def test_the_answer_tag_and_the_whole_response_are_options():
    problem = build_task(gym()).problem(0)
    tagged = build_task(gym(answer_tag="final"))
    assert tagged.score(problem, f"<final>{problem.answer}</final>") == 1.0
    assert tagged.score(problem, f"<answer>{problem.answer}</answer>") == 0.0
    assert build_task(gym(extract="whole")).score(problem, problem.answer) == 1.0


def test_training_and_evaluation_draw_from_seeds_that_no_run_shares():
    runs = [build_task(gym(seed=seed, size=size)) for seed, size in [(0, 10), (7, 5000), (2**31 - 60, 60)]]
    trained = [range(run.train_data.seed, run.train_data.seed + len(run)) for run in runs]
    evaluated = [range(run.eval_data.seed, run.eval_data.seed + run.eval_size) for run in runs]
    assert max(seeds.stop for seeds in trained) <= min(seeds.start for seeds in evaluated)
    assert max(seeds.stop for seeds in evaluated) <= 2**32


@pytest.mark.parametrize("max_value", [3, 6, 99])
def test_no_question_is_both_trained_and_evaluated(max_value):
    task = build_task(gym(params={"max_value": max_value}, size=300, eval_size=3 if max_value == 3 else 20))
    trained = {task.problem(i).prompt for i in range(len(task))}
    evaluated = {task.problem(i, "eval").prompt for i in range(task.eval_size)}
    drawn = {task.train_data[i]["question"] for i in range(len(task))}
    assert not trained & evaluated
    assert trained == drawn - evaluated
    if max_value < 99:
        assert drawn & evaluated, "this test needs a dataset that draws the same question twice"


def test_a_dataset_with_too_few_questions_is_refused():
    with pytest.raises(ValueError, match="eval_size = 200: every question of gcd is held out"):
        build_task(gym(params={"max_value": 2}, eval_size=200))


def test_entries_are_generated_on_demand_and_follow_from_the_seed():
    huge = build_task(gym(size=2**30))
    assert len(huge) == 2**30
    assert huge.problem(2**30 - 1) == huge.problem(2**30 - 1)
    assert huge.problem(0) == build_task(gym()).problem(0) != build_task(gym(seed=1)).problem(0)
    with pytest.raises(IndexError):
        huge.problem(2**30)


def test_a_scorer_pickles_as_its_settings():
    task = build_task(gym())
    payload = pickle.dumps(task.scorer)
    assert len(payload) < 1000
    problem = task.problem(0)
    assert pickle.loads(payload)(problem, [f"<answer>{problem.answer}</answer>", "?"]) == [Reward(1.0), Reward(0.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "gdc"}, "name = 'gdc': .* did you mean 'gcd'"),
        ({"params": {"max_valu": 9}}, "params.max_valu: gcd has no such parameter; did you mean 'max_value'"),
        ({"params": {"seed": 9}}, "params.seed: give seed as the task's own setting"),
        ({"params": {"min_value": 1, "max_value": 0}}, "^params.max_value = 0 does not suit gcd: max_value must be"),
        ({"params": {"min_value": "one"}}, "^params.min_value = 'one' does not suit gcd"),
        ({"name": "composite", "params": {"datasets": [{"nam": "gcd"}]}}, "params.datasets: .*'nam'"),
        ({"seed": 2**31}, "seed = 2147483648"),
        ({"reward_scope": "group"}, "reward_scope = .group. needs a reward function of your own"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build_task(gym(**changes))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(json_like)
def test_metadata_survives_json_exactly(value):
    restored = unpack(json.loads(json.dumps(pack(value))))
    assert restored == value
    assert repr(restored) == repr(value)
