"""Starts the processes of a run: this one, or several ranks."""

from __future__ import annotations

from april.config.recipe import Recipe
from april.training.agent import Agent
from april.training.rank_process import is_rank


def start(recipe: Recipe, resume: bool = False) -> int:
    """Train, and return the exit status.

    Args:
        recipe: a checked one.
        resume: go on with the run in the recipe's directory.
    """
    if recipe.trainer.sharded and not is_rank():
        return Agent(recipe).run(resume)
    from april.commands.trainer import run_trainer  # imports torch and transformers, which an agent does without

    return run_trainer(recipe, resume)
