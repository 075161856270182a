"""Metrics of each step about its engines and the weights sent to them."""

from __future__ import annotations

from pathlib import Path

from april.engines.member import ReplicaState
from april.engines.pool import EnginePool
from april.engines.weight_transfer import directory_of
from april.training.engine_stats import EngineStats, bytes_of
from tests.engines.test_pool import Machine, make_samples, submit


async def test_engines_are_counted_and_each_loss_once() -> None:
    pool = EnginePool([Machine("one"), Machine("other")])
    fleet = EngineStats(pool)
    assert fleet.metrics() == {"engines": 2, "engines_ready": 2, "engines_used": 0, "nodes": 1, "engines_lost": 0}
    for state in (ReplicaState.LOST, ReplicaState.READY, ReplicaState.LOST):
        pool.members[0].become(state)
    assert fleet.metrics() == {"engines": 2, "engines_ready": 1, "engines_used": 0, "nodes": 1, "engines_lost": 2}
    assert fleet.metrics()["engines_lost"] == 0
    assert EngineStats(Machine("alone")).metrics() == {}
    await pool.close()


async def test_engines_that_received_samples_are_counted_per_call() -> None:
    pool = EnginePool([Machine("one")])
    fleet = EngineStats(pool)
    for samples, used in ((make_samples(1), 1), ([], 0)):
        submit(pool, samples)
        assert fleet.metrics()["engines_used"] == used
    pool.add(Machine("joins"))
    pool.members[1].become(ReplicaState.READY)
    submit(pool, make_samples(5)[1:])
    assert fleet.metrics()["engines_used"] == 2
    await pool.close()


def test_bytes_of_an_update_are_the_size_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text("{}")
    assert bytes_of(directory_of(tmp_path)) == 1000
    assert bytes_of(None) is None
