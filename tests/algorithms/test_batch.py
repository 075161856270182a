"""Batches contain all sampled tokens at their positions."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Sample, SamplingParams
from april.algorithms.batch import Batch
from tests.training.steps import VERSION, rollout


@given(st.integers(0, 10_000), st.data())
@settings(max_examples=50, deadline=None)
def test_rows_are_samples_as_they_were_sampled(seed: int, data: st.DataObject) -> None:
    samples = [sample for group in rollout(seed).groups for sample in group.samples]
    batch = dataclasses.replace(Batch.of(samples, VERSION), advantages=torch.arange(float(len(samples))))
    rows = data.draw(st.lists(st.sampled_from(range(len(samples))), min_size=1, unique=True))
    cut = batch.rows(rows)
    assert cut.input_ids.shape == (len(rows), max(cut.lengths))
    for row, index in enumerate(rows):
        check_row(samples[index], cut, row)
        assert cut.advantages is not None
        assert cut.advantages[row] == index


def test_samples_that_began_at_another_temperature_keep_it() -> None:
    """A run was resumed with another temperature: whatever else is in the step, their scores are those of their own."""
    samples = [
        sample for group in rollout(1, sampling=SamplingParams(64, temperature=0.7)).groups for sample in group.samples
    ]
    assert Batch.of(samples, VERSION, 0.7).temperatures is None
    batch = Batch.of(samples, VERSION, 0.4)
    assert batch.temperatures is not None
    assert set(batch.temperatures[batch.mask].tolist()) == {torch.tensor(0.7).item()}


def check_row(sample: Sample, batch: Batch, row: int) -> None:
    """Ids, log-probabilities and ages are those that were sampled, each where it belongs."""
    whole = [*sample.prompt_ids, *sample.response_ids]
    assert batch.lengths[row] == len(whole)
    assert batch.input_ids[row, : len(whole)].tolist() == whole
    start = len(sample.prompt_ids) - 1
    where = slice(start, start + sample.length)
    assert batch.mask[row, where].tolist() == sample.loss_mask.tolist()
    assert int(batch.mask[row].sum()) == int(sample.loss_mask.sum())
    mask = batch.mask[row, where]
    torch.testing.assert_close(batch.rollout_logprobs[row, where][mask], torch.from_numpy(sample.logprobs)[mask])
    assert (VERSION - batch.token_staleness[row, where][mask]).tolist() == sample.versions[sample.loss_mask].tolist()
    assert not batch.rollout_logprobs[row][~batch.mask[row]].any()
    assert not batch.token_staleness[row][~batch.mask[row]].any()
