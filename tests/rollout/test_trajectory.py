from __future__ import annotations

import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import ENVIRONMENT, Chunk, FinishReason, Group, Prompt, SamplingParams, Segment
from april.rollout.batch import Plan, RolloutBatch
from april.rollout.journal.records import encode
from april.rollout.trajectory.transition import Transition

CHUNKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=8)
"""Tokens of a chunk, and by how much the version grew before it."""


def start(max_tokens: int = 100, n: int = 2, max_turns: int = 0) -> Group:
    sampling = SamplingParams(max_tokens, stop_token_ids=(1,), max_turns=max_turns)
    return Group.start(7, Prompt((1, 2), "p", {"answer": "x"}), n, sampling, 3)


@given(CHUNKS)
def test_every_token_keeps_its_id_its_probability_and_its_version(chunks: list[tuple[int, int]]) -> None:
    sample = start().samples[0]
    ids, logprobs, versions, version = [], [], [], 0
    for n, growth in chunks:
        version += growth
        new = list(range(len(ids), len(ids) + n))
        sample.extend(new, [-float(i) for i in new], version)
        ids += new
        logprobs += [-float(i) for i in new]
        versions += [version] * n
    assert sample.response_ids == ids
    assert sample.logprobs.tolist() == logprobs
    assert sample.versions.tolist() == versions
    assert sample.loss_mask.all()
    assert sample.length == len(ids)
    assert sample.first_version == (versions[0] if versions else None)
    assert len(sample.segments) == len(set(versions)), "one segment a version"


@given(CHUNKS, st.booleans())
def test_a_group_survives_json(chunks: list[tuple[int, int]], finished: bool) -> None:
    group = start()
    version = 0
    for n, growth in chunks:
        version += growth
        group.samples[0].extend([5] * n, [-0.1] * n, version)
    if finished:
        group.samples[0].finish = FinishReason.LENGTH
        group.samples[0].reward = 0.5
    assert Group.from_dict(json.loads(json.dumps(group.to_dict()))) == group


def test_environment_tokens_are_part_of_the_response_and_not_of_the_loss() -> None:
    sample = start().samples[0]
    sample.extend([5, 6], [-1.0, -2.0], 0)
    sample.segments.append(Segment(ENVIRONMENT, [7], [0.0]))
    sample.length += 1
    sample.extend([8], [-3.0], 1)
    assert sample.response_ids == [5, 6, 7, 8]
    assert sample.loss_mask.tolist() == [True, True, False, True]
    assert sample.versions.tolist() == [0, 0, ENVIRONMENT, 1]
    np.testing.assert_array_equal(sample.logprobs, [-1, -2, 0, -3])


def test_the_budget_belongs_to_the_sample() -> None:
    sample = start(max_tokens=3).samples[0]
    sample.extend([1, 2], [0.0, 0.0], 0)
    assert sample.budget_left == 1
    with pytest.raises(ValueError, match=r"2 tokens came where the response budget leaves 1"):
        sample.extend([3, 4], [0.0, 0.0], 0)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (([1], [], 0), "1 tokens came with 0 log-probabilities"),
        (([1], [0.0], 0), "versions never go back"),
        (([1], [0.0], -1), "versions never go back"),
    ],
)
def test_invalid_tokens_of_an_engine_are_refused(chunk: tuple[list[int], list[float], int], message: str) -> None:
    sample = start().samples[0]
    sample.extend([9], [-1.0], 1)
    with pytest.raises(ValueError, match=message):
        sample.extend(*chunk)


def test_a_finished_sample_never_changes() -> None:
    sample = start().samples[0]
    sample.extend([1], [-1.0], 0, FinishReason.STOP)
    with pytest.raises(ValueError, match="has finished"):
        sample.extend([2], [-1.0], 0)


def test_staleness_counts_from_the_first_token_of_the_group() -> None:
    group = start()
    assert group.staleness(9) == 0, "no token, no age"
    group.samples[1].extend([1], [-1.0], 2)
    group.samples[0].extend([1], [-1.0], 4)
    assert group.first_version == 2
    assert group.staleness(5) == 3


def test_seeds_differ_between_samples_groups_and_runs() -> None:
    prompt, sampling = Prompt((1,)), SamplingParams()
    seeds = [s.seed for run in (0, 1) for id in (0, 1) for s in Group.start(id, prompt, 4, sampling, run).samples]
    assert len(set(seeds)) == 16
    assert [s.seed for s in Group.start(0, prompt, 4, sampling, 0).samples] == seeds[:4]


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1}]
)
def test_invalid_sampling_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_observations_may_count_towards_the_budget_except_the_first() -> None:
    sampling = SamplingParams(5, stop_token_ids=(1,), max_turns=3, observations_count=True)
    sample = Group.start(0, Prompt((5, 6)), 1, sampling, seed=7).samples[0]
    sample.observe([9, 9], Transition(0, 2))
    sample.extend([2, 1], [-1.0, -1.0], 0, FinishReason.STOP)
    sample.observe([8], Transition(4, 1))
    assert sample.budget_left == 2
    with pytest.raises(ValueError, match="leaves 2"):
        sample.extend([2, 3, 4], [-1.0] * 3, 0)
    assert Group.from_dict(Group(0, Prompt((5, 6)), [sample]).to_dict()).samples[0].budget_left == 2


def test_tokens_of_an_environment_use_no_budget_and_have_no_policy_version() -> None:
    group = start(max_tokens=3, max_turns=2)
    sample = group.samples[0]
    sample.observe([], Transition(0, 0))
    sample.extend([1, 2], [-1.0, -1.0], 4, FinishReason.STOP)
    assert sample.awaits_environment
    assert sample.finish is None
    with pytest.raises(ValueError, match="turn has ended"):
        sample.extend([3], [-1.0], 4)
    sample.observe([8, 9, 10], Transition(2, 3, 0.5))
    assert (sample.length, sample.policy_tokens, sample.budget_left) == (5, 2, 1)
    sample.extend([3], [-2.0], 4)
    assert sample.versions.tolist() == [4, 4, -1, -1, -1, 4]
    assert sample.loss_mask.tolist() == [True, True, False, False, False, True]
    assert sample.logprobs.tolist() == [-1, -1, 0, 0, 0, -2]
    assert group.to_dict() == Group.from_dict(group.to_dict()).to_dict()
    assert (group.tokens, group.environment_tokens) == (3, 3)
    assert (sample.turn_ids(0), sample.turn_ids(1)) == ((1, 2), (3,))
    sample.extend([], [], 4, FinishReason.STOP)
    sample.observe([], Transition(6, 0), FinishReason.DONE)
    with pytest.raises(ValueError, match="has finished"):
        sample.observe([1], Transition(6, 1))


@given(CHUNKS, st.booleans())
def test_packed_tokens_stay_packed_and_give_the_same_response(chunks: list[tuple[int, int]], mixed: bool) -> None:
    """From arrays as from lists, and from both in turn: the same sample, journal records and saved state."""
    group, packed = start(), start()
    version, events, same = 0, [], []
    for i, (n, growth) in enumerate(chunks):
        version += growth
        ids, logprobs = list(range(n)), [-0.1 * i for i in range(n)]
        arrays = (array("i", ids), array("d", logprobs)) if not mixed or i % 2 else (ids, logprobs)
        group.samples[0].extend(ids, logprobs, version)
        packed.samples[0].extend(*arrays, version)
        events.append(Chunk("7.0", ids, logprobs, version))
        same.append(Chunk("7.0", *arrays, version))
    assert list(encode(same, 1)) == list(encode(events, 1))
    assert packed.to_dict() == group.to_dict()
    assert packed.samples[0].response_ids == group.samples[0].response_ids
    assert packed.samples[0].logprobs.tolist() == group.samples[0].logprobs.tolist()
    if not mixed:
        assert all(isinstance(segment.token_ids, array) for segment in packed.samples[0].segments)
    with pytest.raises(ValueError, match="no finite number"):
        packed.samples[0].extend(array("i", [1]), array("d", [float("nan")]), version)


def test_redrafted_tokens_have_a_metric() -> None:
    group = Group.start(0, Prompt((1,)), 1, SamplingParams(max_tokens=4), seed=0)
    (sample,) = group.samples
    sample.extend([1, 2, 3], [-1.0] * 3, 0)
    sample.redraft()
    sample.extend([1, 2, 4], [-1.0] * 3, 1)
    metrics = RolloutBatch(1, Plan(1), [group]).metrics()
    assert {name: metrics[name] for name in metrics if "draft" in name} == {
        "samples_redrafted": 1,
        "redrafted_tokens": 3,
        "redrafted_tokens_kept": 2,
    }
