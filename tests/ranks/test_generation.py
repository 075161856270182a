"""Every rank generates, and the results equal the results of one engine."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.launch import run


def test_two_ranks_generate_the_tokens_of_one_engine(tmp_path: Path) -> None:
    for said in run("tests.ranks.generation:compare", 2, tmp_path, directory=str(tmp_path)):
        assert "release" in said.partition("train")[0].splitlines(), said


def test_engines_and_trainer_of_two_ranks_use_the_devices_in_turn(tmp_path: Path) -> None:
    run("tests.ranks.generation:in_turns", 2, tmp_path, directory=str(tmp_path))


def test_every_rank_keeps_the_keys_and_values_of_stopped_samples(tmp_path: Path) -> None:
    run("tests.ranks.generation:keep", 2, tmp_path, directory=str(tmp_path))


def test_a_rank_whose_engine_lacks_memory_shrinks_its_cache_or_is_named(tmp_path: Path) -> None:
    said, _ = run("tests.ranks.generation:lack_memory", 2, tmp_path, directory=str(tmp_path))
    assert "rank 1: a forward pass of the embedded engine failed: out of memory; lower engine.kv_cache_gb" in said
