from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from april import Chunk, FinishReason, Sample, SamplingParams
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.events import Admitted
from april.rollout.gc_tuning import THRESHOLDS, raise_gc_thresholds
from april.rollout.generation.in_flight import InFlight
from april.rollout.params import RolloutParams
from april.rollout.state import RolloutState
from april.rollout.trajectory.prompt import Prompt
from tests.scripted_engine import ScriptedEngine

GROUPS, SIZE = 128, 16


class Accepting(ScriptedEngine):
    """Keeps nothing of a sample, so that only the scheduler's objects count."""

    def submit(self, sample: Sample) -> None:
        pass


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_a_small_run_keeps_the_least_threshold() -> None:
    raise_gc_thresholds(8)
    assert gc.get_threshold() == THRESHOLDS


@pytest.mark.usefixtures("thresholds")
def test_the_objects_of_a_step_fit_the_youngest_generation() -> None:
    """Twice as many samples as a step trains on are admitted, submitted and sampled by three policy versions."""
    params = RolloutParams(rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, over_sampling_batch_size=2 * GROUPS)
    state = RolloutState(params, LengthModel(64), FixedAdmission(2 * GROUPS), False, False)
    in_flight, intervals = InFlight(), []
    raise_gc_thresholds(GROUPS * SIZE)
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    for id in range(2 * GROUPS):
        state.apply(Admitted(id, Prompt((1, 2)), SIZE, SamplingParams(max_tokens=64), seed=0))
    in_flight.submit(Accepting(), list(state.buffer.samples), 0.0, intervals)
    for version in range(3):
        state.engine_version = version
        finish = FinishReason.STOP if version == 2 else None
        for sample in list(state.buffer.samples):
            state.absorb([Chunk(sample.id, [1, 2], [-0.5, -0.5], version, finish)], in_flight.samples)
    assert len(state.ready) == 2 * GROUPS
    assert gc.get_stats()[0]["collections"] == before
