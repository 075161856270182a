from __future__ import annotations

import inspect
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
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.training.learner_objective import build_objective
from tests.limits import HANG


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


INF = float("inf")
PUBLISHED = {
    "grpo": ("grpo", "ppo_clip", (0.2, 0.2), "sequence-mean", ("k3", 0.04, "loss"), ()),
    "dr_grpo": ("dr_grpo", "ppo_clip", (0.2, 0.2), "constant", None, ()),
    "dapo": (
        "grpo",
        "ppo_clip",
        (0.2, 0.28),
        "token-mean",
        None,
        ("dynamic_sampling", "overlong_filter", "soft_overlong_penalty"),
    ),
    "gspo": ("grpo", "gspo", (3e-4, 4e-4), "sequence-mean", None, ()),
    "gspo_token": ("grpo", "gspo_token", (3e-4, 4e-4), "sequence-mean", None, ()),
    "cispo": ("grpo", "cispo", (INF, 4.0), "token-mean", None, ("dynamic_sampling", "soft_overlong_penalty")),
    "rloo": ("rloo", "ppo_clip", (INF, INF), "constant", ("k1", 0.03, "reward"), ()),
    "reinforce_plus_plus": (
        "reinforce_plus_plus",
        "ppo_clip",
        (0.2, 0.2),
        "token-mean",
        ("k1", 0.001, "reward"),
        (),
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        "ppo_clip",
        (0.2, 0.2),
        "token-mean",
        ("k2", 0.001, "loss"),
        (),
    ),
    "ppo": ("gae", "ppo_clip", (0.2, 0.2), "token-mean", ("k1", 0.02, "reward"), ()),
}
"""Advantage, loss, clip range, aggregation, KL term and DAPO's pieces, as the papers have them."""

PIECES = ("dynamic_sampling", "overlong_filter", "soft_overlong_penalty")


def test_a_name_gives_the_published_settings() -> None:
    found = {}
    for name, entry in ALGORITHMS.items():
        kl = (entry.kl_estimator, entry.kl_coefficient, entry.kl_place) if entry.kl_estimator else None
        pieces = tuple(piece for piece in PIECES if getattr(entry, piece))
        clip = (entry.eps_low, entry.eps_high)
        found[name] = (entry.advantage, entry.loss, clip, entry.aggregation, kl, pieces)
        assert entry.dual_clip is None
        assert (entry.gamma, entry.lam) == (1.0, 0.95 if name == "ppo" else 1.0)
    assert found == PUBLISHED


def test_each_algorithm_names_its_papers() -> None:
    assert {name: entry.sources for name, entry in ALGORITHMS.items()} == {
        "grpo": ("2402.03300",),
        "dr_grpo": ("2503.20783",),
        "dapo": ("2503.14476",),
        "gspo": ("2507.18071",),
        "gspo_token": ("2507.18071",),
        "cispo": ("2506.13585", "2510.13786"),
        "rloo": ("2402.14740",),
        "reinforce_plus_plus": ("2501.03262",),
        "reinforce_plus_plus_baseline": ("2501.03262",),
        "ppo": ("1707.06347", "1506.02438", "2203.02155"),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_function_has_the_clip_range_of_its_algorithm(name: str) -> None:
    own = {key: parameter.default for key, parameter in inspect.signature(LOSSES[name]).parameters.items()}
    assert (own["eps_low"], own["eps_high"]) == PUBLISHED["grpo" if name == "ppo_clip" else name][2]


def test_corrections_have_the_published_bounds() -> None:
    assert {name: rule.bounds for name, rule in CORRECTIONS.items()} == {
        "none": {},
        "rollout_logprobs": {},
        "decoupled": {"cap": INF, "low": 0.0, "high": INF},
        "tis": {"cap": 2.0, "low": 0.0, "high": INF},
        "icepop": {"cap": INF, "low": 0.5, "high": 5.0},
        "sequence": {"cap": 2.0, "low": 0.0, "high": INF},
        "geometric": {"cap": INF, "low": 0.99, "high": 1.01},
        "dppo": {"delta": 0.2},
        "opsm": {"delta": 1e-4},
    }


def test_all_corrections_are_listed() -> None:
    assert tuple(CORRECTIONS) == get_args(CorrectionKind)


def test_an_unknown_algorithm_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        algorithm("gsop")
    with pytest.raises(ValueError, match="must be one of grpo, dr_grpo"):
        algorithm("xyz")


def test_listing_imports_no_torch() -> None:
    program = "import april.algorithms, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG).returncode == 0


def test_corrections_of_algorithms_are_in_the_catalogue_and_gspos_does_not_clip_older_policies() -> None:
    for name, entry in ALGORITHMS.items():
        settings = AlgorithmSettings(algorithm=name)
        assert settings.correction is None
        assert settings.correction_in_use == entry.correction
        assert entry.correction in CORRECTIONS
        assert not build_objective(settings, 64).clips_older_policies
    assert AlgorithmSettings(algorithm="gspo", correction="rollout_logprobs").correction_in_use == "rollout_logprobs"
    assert build_objective(AlgorithmSettings(algorithm="gspo"), 64).correction == "geometric"
