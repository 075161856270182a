"""A policy in Megatron-Core, by Megatron-Bridge: it computes what transformers computes, and comes back exactly.

That is what a backend on Megatron would stand on; april has none. scripts/setup_megatron.sh makes an environment for
this; run this file with that environment's Python. What stands in for CUDA is in `megatron_on_cpu.py`.
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

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_policy_goes_into_megatron_and_back(parts: int, tmp_path: Path) -> None:
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
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * parts, "\n".join(said)
    found = [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(parts)]
    assert all(rank["different"] == [] for rank in found), "exported weights are those that went in, to the bit"
    assert all(rank["logits"] < 1e-4 for rank in found), found
    assert all(rank["largest"] > 1 for rank in found)
