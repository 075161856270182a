"""Objective and sampling distribution of a learner, from its settings; check that a checkpoint belongs to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from april.algorithms.objective import Objective, resolve
from april.algorithms.truncation import WHOLE, Truncation
from april.config.error import ConfigError
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.config.settings.rollout_settings import RolloutSettings
from april.training.checkpoint import TRAINING, load_state
from april.training.learner_settings import LearnerSettings
from april.training.sharded_files import stored

AS_BEGUN = "resume with the model, and the algorithm, kl_coef and lora settings, that the run was begun with"
"""Advice if a checkpoint does not match the settings."""


def build_objective(settings: AlgorithmSettings, budget: int) -> Objective:
    """Return the objective of a recipe's section `algorithm`, with responses of at most `budget` tokens.

    Raises:
        ValueError: there is no such algorithm.
    """
    correction: Any = settings.correction_in_use
    own = {
        "eps_low": settings.eps_low,
        "eps_high": settings.eps_high,
        "dual_clip": settings.dual_clip,
        "aggregation": settings.loss_aggregation,
        "kl_coefficient": settings.kl_coef,
        "gamma": settings.gamma,
        "lam": settings.gae_lambda,
    }
    chosen = resolve(settings.algorithm, correction, own)
    bounds = settings.correction_bounds
    more = (settings.entropy_coef, settings.value_clip, settings.turn_discount)
    return Objective(chosen, budget, correction, bounds, *more)


def sampling_distribution(rollout: RolloutSettings) -> tuple[float, Truncation]:
    """Return temperature and truncation of recorded log-probabilities; for greedy sampling engines record at 1 and
    none."""
    if rollout.temperature == 0:
        return 1.0, WHOLE
    return rollout.temperature, Truncation(rollout.top_k, rollout.top_p, rollout.min_p)


def check_checkpoint_of(settings: LearnerSettings, checkpoint: Path) -> None:
    """Check that a run's checkpoint has the state that a learner needs, before anything is loaded.

    Raises:
        ConfigError: the checkpoint belongs to another algorithm, or to other adapters.
    """
    budget, lora = settings.rollout.max_response_length, settings.lora
    objective = build_objective(settings.algorithm, budget)
    needed = {"random", "policy_optimizer"}
    needed |= {"critic", "critic_optimizer"} if objective.algorithm.value_head else set()
    needed |= {"adapters"} if lora.rank else {"reference"} if objective.regularised else set()
    saved = {name.partition(".")[0] for name in stored(checkpoint / TRAINING, "state")}
    if needed != saved:
        have, need = (", ".join(sorted(names)) for names in (saved, needed))
        raise ConfigError(f"{checkpoint} holds {have}, but these settings need {need}: {AS_BEGUN}")
    before = load_state(checkpoint)["recipe"]["lora"]
    for name in ("rank", "target_modules") if lora.rank else ():
        if (asked := getattr(lora, name)) != type(asked)(before[name]):
            raise ConfigError(f"lora.{name} = {asked}, but {checkpoint} has adapters of {before[name]}: {AS_BEGUN}")
