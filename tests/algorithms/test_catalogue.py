from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
import torch

from april.algorithms import ALGORITHMS, algorithm
from april.algorithms.advantages import ADVANTAGES
from april.algorithms.catalogue import CORRECTIONS
from april.algorithms.corrections import CorrectionKind
from april.algorithms.losses import LOSSES, aggregate


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_names_things_that_exist_and_trains(name: str) -> None:
    entry = algorithm(name)
    assert entry.name == name
    assert entry.sources
    assert bool(entry.kl_estimator) == bool(entry.kl_coefficient)
    assert entry.value_head == (name == "ppo")
    rewards = torch.tensor([[1.0, 0.0]])
    advantages = (rewards if entry.value_head else ADVANTAGES[entry.advantage](rewards)).flatten()
    live, mask = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    result = LOSSES[entry.loss](live, live.detach(), advantages, mask, eps_low=entry.eps_low, eps_high=entry.eps_high)
    aggregate(result.loss, mask, entry.aggregation, 6.0).backward()
    # The rewarded response becomes more probable.
    assert (live.grad[0] < 0).all()


def test_published_clip_ranges() -> None:
    bounds = {name: (entry.eps_low, entry.eps_high) for name, entry in ALGORITHMS.items()}
    assert bounds["dapo"] == (0.2, 0.28)
    assert bounds["gspo"] == bounds["gspo_token"] == (3e-4, 4e-4)
    assert bounds["cispo"] == (float("inf"), 4.0)
    assert bounds["grpo"] == bounds["ppo"] == (0.2, 0.2)


def test_the_corrections_listed_are_those_there_are() -> None:
    assert tuple(CORRECTIONS) == get_args(CorrectionKind)


def test_an_unknown_algorithm_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        algorithm("gsop")
    with pytest.raises(ValueError, match="must be one of grpo, dr_grpo"):
        algorithm("xyz")


def test_listing_imports_no_torch() -> None:
    program = "import april.algorithms, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
