"""`april train RECIPE`: a run from its beginning."""

from __future__ import annotations

from pathlib import Path

from april.commands import resume
from april.commands.arguments import read_recipe
from april.commands.start import start
from april.training.output import prepare_output
from april.training.rank_process import leads, started_anew
from april.training.resume import RECIPE, check_run

DESCRIPTION = """Train a causal language model by reinforcement learning, with active partial rollouts.

RECIPE is a TOML file; each flag below overrides its setting of the same name, and the defaults shown are the recipe's
where one is given. april resume DIR goes on with a run that was stopped, or died.

The run's directory gets metrics.jsonl, TensorBoard events, checkpoints that transformers loads, report.html and
summary.json. Ctrl-C stops cleanly."""


def run(args: list[str]) -> int:
    """`april train RECIPE [FLAGS]`; with `--resume DIR` anywhere among them, `april resume`."""
    if resume.asked_for(args):
        return resume.run(resume.arguments(args))
    recipe = read_recipe(args, "april train", DESCRIPTION)
    directory = Path(recipe.reporting.output)
    resumed = started_anew() and (directory / RECIPE).is_file()
    if leads() and resumed:
        list(check_run(directory))
    elif leads():
        prepare_output(directory, recipe.reporting.if_exists)
    return start(recipe, resumed)
