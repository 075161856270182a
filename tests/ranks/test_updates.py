"""What two ranks compute is what one process computes."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.launch import run
from tests.ranks.updates import CASES


def test_two_context_parallel_ranks_make_the_updates_of_one_process(tmp_path: Path) -> None:
    """Each runs the layers over half of the tokens, with two attention heads and one of keys and values."""
    cases = ["grpo", "ppo"]
    for said in run("tests.ranks.updates:compare", 2, tmp_path, cases=cases, context=2):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


def test_two_updates_of_every_algorithm_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    for said in run("tests.ranks.updates:compare", 2, tmp_path, cases=list(CASES)):
        assert [f"{case}: ok" in said for case in CASES] == [True] * len(CASES), said


def test_episodes_of_several_sequences_make_the_same_updates_on_two_ranks(tmp_path: Path) -> None:
    """Their rows are divided over the ranks at random places, and each turn has a temperature of its own."""
    cases = ["grpo", "dapo", "gspo", "ppo", "reference"]
    for said in run("tests.ranks.updates:compare", 2, tmp_path, cases=cases, branches=True):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


def test_two_tensor_and_expert_parallel_ranks_make_the_updates_of_one_process(tmp_path: Path) -> None:
    layout = {"policy": "mixture", "tensor": 2, "expert": 2}
    for said in run("tests.ranks.updates:compare", 2, tmp_path, cases=["grpo"], parameters=1e-5, **layout):
        assert "grpo: ok" in said, said


def test_two_ranks_train_and_store_adapters_of_a_mixture_as_one_process_does(tmp_path: Path) -> None:
    for said in run("tests.ranks.updates:compare", 2, tmp_path, cases=["lora"], policy="mixture", parameters=1e-5):
        assert "lora: ok" in said, said
    stored = {"case": "lora", "directory": str(tmp_path / "saved"), "kind": "mixture"}
    for step in ("save", "load"):
        run(f"tests.ranks.checkpoints:{step}", 2, tmp_path, **stored)


def test_two_ranks_replay_routes_as_one_process_does(tmp_path: Path) -> None:
    for layout in ({}, {"tensor": 2, "expert": 2}, {"context": 2}):
        for said in run("tests.ranks.updates:replay", 2, tmp_path, **layout):
            assert "replay: ok" in said, said
