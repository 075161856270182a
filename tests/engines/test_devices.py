"""No GPU is given twice, and everything gets its GPUs or nothing does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.devices import GpuShortageError, assign
from april.engines.gpus import Gpu, variables_for


@given(
    count=st.integers(0, 16),
    training=st.sets(st.integers(0, 15), max_size=8).map(sorted),
    engines=st.integers(0, 8),
    each=st.integers(0, 8),
)
def test_every_map_is_whole_and_without_overlap(count: int, training: list[int], engines: int, each: int) -> None:
    gpus = [Gpu(str(i), i) for i in range(count)]
    fits = all(place < count for place in training) and len(training) + engines * each <= count
    if not fits:
        with pytest.raises(GpuShortageError):
            assign(gpus, training, engines, each)
        return
    devices = assign(gpus, training, engines, each)
    assert sorted(devices.all, key=lambda gpu: gpu.number) == gpus
    assert [gpu.number for gpu in devices.training] == training
    assert [len(own) for own in devices.engines] == [each] * engines
    rows = list(devices.rows([f"vllm-{i}" for i in range(engines)]))
    assert len(rows) == count
    assert len({gpu for gpu, _ in rows}) == count


def test_an_engine_without_gpus_sees_none() -> None:
    devices = assign([Gpu("0", 0)], [0], 2, 0)
    assert devices.environment(1) == {"CUDA_VISIBLE_DEVICES": "-1"} == variables_for([])
