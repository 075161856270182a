"""The backend on Megatron-Core: results, updates, checkpoints and resumptions match one process.

scripts/setup_megatron.sh makes an environment for this; run this file with that environment's Python. The stand-ins
for CUDA are in `megatron_on_cpu.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron is not installed here: scripts/setup_megatron.sh", allow_module_level=True)

from tests import tiny
from tests.limits import HANG
from tests.ranks.launch import run
from tests.ranks.runs import recipe_in, survive_a_killed_rank

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_policy_is_converted_to_megatron_and_back(parts: int, tmp_path: Path) -> None:
    policy, out = tiny.save(tmp_path / "policy", tie_word_embeddings=False, vocab_size=128), tmp_path / "out"
    command = [sys.executable, "-m", "tests.integrations.megatron_rank", str(policy), str(out)]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(parts), "LOCAL_WORLD_SIZE": str(parts)}
    ranks = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(parts)
    ]
    try:
        said = [rank.communicate(timeout=HANG)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * parts, "\n".join(said)
    found = [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(parts)]
    assert all(rank["different"] == [] for rank in found), "exported weights are those that went in, to the bit"
    assert all(rank["logits"] < 1e-4 for rank in found), found
    assert all(rank["largest"] > 1 for rank in found)


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_updates_of_every_algorithm_match_one_process(tensor: int, tmp_path: Path) -> None:
    """With one part of the layers, two ranks have tokens of their own each."""
    cases = ["grpo", "dapo", "gspo", "reference", "penalty"]
    for said in run("tests.integrations.megatron_updates:compare", 2, tmp_path, cases=cases, tensor=tensor):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


def test_tensor_and_context_parallelism_can_be_combined(tmp_path: Path) -> None:
    for said in run("tests.integrations.megatron_updates:compare", 4, tmp_path, cases=["grpo"], tensor=2, tied=False):
        assert "grpo: ok" in said, said


def test_memory_leaves_the_device_and_comes_back(tmp_path: Path) -> None:
    for said in run("tests.integrations.megatron_updates:leave", 2, tmp_path, tensor=2, directory=str(tmp_path)):
        assert "left" in said, said


def test_activations_are_recomputed(tmp_path: Path) -> None:
    options = {"tensor": 2, "checkpointing": True}
    for said in run("tests.integrations.megatron_updates:compare", 2, tmp_path, cases=["grpo"], **options):
        assert "grpo: ok" in said, said


def test_a_checkpoint_resumes_with_and_without_megatron(tmp_path: Path) -> None:
    for said in run("tests.integrations.megatron_updates:resume", 2, tmp_path, tensor=2, directory=str(tmp_path)):
        assert "resumed" in said, said


def test_a_run_with_a_killed_rank_loses_no_sample(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, "run")
    layout = 'processes = 2\nbackend = "megatron"\ntensor_parallel = 2'
    recipe.write_text(recipe.read_text().replace("processes = 2", layout))
    survive_a_killed_rank(recipe, tmp_path / "run", modules=Path(__file__).parent / "cpu_site")


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_peak_of_a_rank_is_near_the_planned_memory(tensor: int, tmp_path: Path) -> None:
    layout = {"tensor": tensor, "tensor_parallel": tensor, "backend": "megatron"}
    where = str(tmp_path / "policy")
    for said in run("tests.ranks.memory:peaks", 2, tmp_path, directory=where, policy="model", **layout):
        found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert 0.8 < found["held"] / found["planned"] < 1.1, found
