"""Check of changed settings against the saved rollouts of a run, without a model or an engine.

Invariants:
- nothing on disk changes;
- settings with which the unfinished groups cannot continue are refused by name.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.history import History
from april.rollout.journal.journal import Journal
from april.rollout.sampling import SamplingParams
from april.rollout.staleness import StalenessError
from april.rollout.state import RolloutState
from april.tasks.build import build_task
from april.tasks.prompts import check_position
from april.training.checkpoint import load_state
from april.training.resume import JOURNAL, newest_checkpoint

SECTIONS = ("task", "rollout", "environment", "engine", "training")
"""Sections of a recipe on which rollouts depend."""


def check_settings(run: Path, before: Recipe, after: Recipe, rewind: bool = False) -> None:
    """Refuse settings with which the run in `run` cannot be resumed.

    Args:
        before: settings of the run so far.
        rewind: ignore the journal after the newest checkpoint.

    Raises:
        ConfigError: names the setting, and `--rewind` if that helps.
        DamageError: the journal is damaged.
    """
    old, new = before.to_dict(), after.to_dict()
    if all(old[section] == new[section] for section in SECTIONS):
        return
    problem = _problem(run, before, after, rewind)
    if problem is None:
        return
    if not rewind and _problem(run, before, after, True) is None:
        checkpoint = newest_checkpoint(run)
        place = checkpoint.name if checkpoint else "the beginning"
        problem += f", or go back to {place}, to which this does not apply: april resume {run} --rewind"
    raise ConfigError(problem)


def _problem(run: Path, before: Recipe, after: Recipe, rewind: bool) -> str | None:
    state, position = _rollouts(run, after, rewind)
    params = state.params
    sizes = {group.size for group in state.buffer}
    if sizes - {params.n_samples_per_prompt}:
        return (
            f"rollout.n_samples_per_prompt = {params.n_samples_per_prompt}: {len(state.buffer)} groups under way have "
            f"{' or '.join(map(str, sorted(sizes)))} samples, and those of a step must be alike; resume with the "
            "former value"
        )
    if any((sample.sampling.max_turns > 0) != after.environment.enabled for sample in state.buffer.samples):
        begun = "without" if after.environment.enabled else "with"
        return (
            f"environment: {len(state.buffer)} groups under way were begun {begun} an environment; resume with the "
            "former settings"
        )
    if problem := _sampling_problem(state, after):
        return problem
    try:
        state.check_bound(state.trainer_version, "not all groups under way can be trained on")
    except StalenessError as error:
        return f"rollout: {error}; raise rollout.max_staleness or rollout.rollout_batch_size"
    return _prompts_problem(before, after, position)


def _sampling_problem(state: RolloutState, after: Recipe) -> str | None:
    """Return why groups under way cannot be scored, or their turns read, with the settings of sampling."""
    sampling, former = after.sampling(), [sample.sampling for sample in state.buffer.samples]
    if any(_kept_tokens(one) != _kept_tokens(sampling) for one in former):
        return (
            f"rollout.top_p, top_k and min_p: {len(state.buffer)} groups under way were begun with other values, and "
            "all tokens of a step are scored with the same; resume with the former values"
        )
    own = after.environment
    if own.enabled and not own.is_program and any(one.stop != sampling.stop for one in former):
        return (
            f"rollout.stop: {len(state.buffer)} groups under way were begun with other stop strings, by which their "
            "environments read turns; resume with the former ones"
        )
    return None


def _kept_tokens(sampling: SamplingParams) -> tuple[float, ...]:
    """Return the truncation of the recorded log-probabilities; those of greedy tokens have none."""
    return (sampling.top_p, sampling.top_k, sampling.min_p) if sampling.temperature else (1.0, 0, 0.0)


def _rollouts(run: Path, recipe: Recipe, rewind: bool) -> tuple[RolloutState, Any]:
    """Return the rollouts that the run would resume, and the saved position of its prompts."""
    params = recipe.rollout_params()
    samples = params.rollout_batch_size * params.n_samples_per_prompt
    lengths = LengthModel.for_batch(recipe.rollout.max_response_length, samples)
    state = RolloutState(params, lengths, FixedAdmission(params.rollout_batch_size), filtered=False, scored=False)
    checkpoint = newest_checkpoint(run)
    saved = load_state(checkpoint)["rollout"] if checkpoint else None
    if saved is not None:
        state.restore(saved["state"])
    position = saved and saved["prompts"]
    if rewind or not (run / JOURNAL).exists():
        return state, position
    with closing(Journal(run / JOURNAL)) as journal:
        journal.seek(saved and saved["journal"])
        history = History(state, journal)
        while True:
            event = history.replay()
            position = history.prompts or position
            if event is None:
                return state, position
            history.replay_event(event)


def _prompts_problem(before: Recipe, after: Recipe, position: Any) -> str | None:
    if position is None or (before.task, before.training.seed) == (after.task, after.training.seed):
        return None
    try:
        check_position(position, build_task(after.task), after.training.seed)
    except ValueError as error:
        return f"task: {error}"
    return None
