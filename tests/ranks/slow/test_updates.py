"""What four ranks compute is what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import run
from tests.ranks.updates import CASES


@pytest.mark.parametrize("world", [1, 3, 4])
def test_two_updates_of_every_algorithm_match_one_process(world: int, tmp_path: Path) -> None:
    for said in run("tests.ranks.updates:compare", world, tmp_path, cases=list(CASES)):
        assert [f"{case}: ok" in said for case in CASES] == [True] * len(CASES), said


@pytest.mark.parametrize("world", [2, 4])
def test_context_parallel_ranks_make_the_updates_of_one_process(world: int, tmp_path: Path) -> None:
    for said in run("tests.ranks.updates:compare", world, tmp_path, cases=list(CASES), context=2):
        assert [f"{case}: ok" in said for case in CASES] == [True] * len(CASES), said


@pytest.mark.parametrize(
    "options",
    [
        {"context": 2, "checkpointing": True},
        {"context": 2, "replicas": 2},
        {"checkpointing": True},
        {"cpu_offload": True},
        {"replicas": 2},
    ],
)
def test_options_do_not_change_the_results(options: dict[str, object], tmp_path: Path) -> None:
    cases = ["grpo", "ppo", "lora"]
    for said in run("tests.ranks.updates:compare", 4, tmp_path, cases=cases, **options):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"tensor": 2}),
        (4, {"tensor": 2}),
        (4, {"tensor": 2, "context": 2, "heads": 4}),
        (4, {"tensor": 2, "replicas": 2, "checkpointing": True}),
        (2, {"policy": "mixture"}),
        (2, {"policy": "mixture", "expert": 2}),
        (4, {"policy": "mixture", "expert": 2}),
        (4, {"policy": "mixture", "expert": 2, "context": 2, "cpu_offload": True}),
        (4, {"policy": "mixture", "expert": 2, "replicas": 2}),
        (4, {"policy": "mixture", "tensor": 2, "expert": 4, "checkpointing": True}),
    ],
)
def test_tensor_parallel_ranks_make_the_updates_of_one_process(
    world: int, options: dict[str, object], tmp_path: Path
) -> None:
    cases = ["grpo", "ppo", "reference"]
    for said in run("tests.ranks.updates:compare", world, tmp_path, cases=cases, parameters=1e-5, **options):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


def test_bfloat16_differs_only_by_rounding(tmp_path: Path) -> None:
    run("tests.ranks.updates:half", 2, tmp_path)


def test_ranks_with_a_divided_vocabulary_have_the_scores_and_gradients_of_one_process(tmp_path: Path) -> None:
    for said in run("tests.ranks.vocabulary:compare", 2, tmp_path):
        assert "same" in said, said
