"""`april train RECIPE`: start a run."""

from __future__ import annotations

from pathlib import Path

from april.commands import resume
from april.commands.arguments import read_recipe
from april.commands.failure import fail
from april.commands.start import check_ranks, start
from april.rollout.journal.journal_file import JournalError
from april.training.checkpoint import CheckpointError
from april.training.rank_protocol import is_rank_zero
from april.training.resume import began_here, check_run, check_unchanged, saved_recipe
from april.training.run_directory import prepare_output

DESCRIPTION = """Train a causal language model by reinforcement learning, with active partial rollouts.

RECIPE is a TOML file; each flag below overrides its setting of the same name, and the defaults shown are the recipe's
where one is given. april resume DIR resumes a run that was stopped or died.

The run's directory gets metrics.jsonl, TensorBoard events, checkpoints that transformers loads, report.html and
summary.json. Ctrl-C stops cleanly."""


def run(args: list[str]) -> int:
    """`april train RECIPE [FLAGS]`; with `--resume DIR` anywhere among them, `april resume`."""
    if resume.asked_for(args):
        return resume.run(resume.arguments(args))
    recipe = read_recipe(args, "april train", DESCRIPTION)
    check_ranks(recipe)
    directory = Path(recipe.reporting.output)
    # torchrun restarts ranks by the command that started them, so a run that this job began is resumed.
    resumed = began_here(directory)
    try:
        if is_rank_zero() and resumed:
            list(check_run(directory))
            check_unchanged(directory, saved_recipe(directory), recipe)
        elif is_rank_zero():
            prepare_output(directory, recipe.reporting.if_exists)
    except (CheckpointError, JournalError) as error:
        return fail(str(error))
    return start(recipe, resumed)
