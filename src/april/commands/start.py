"""Starts the processes of a run: this one, or several ranks."""

from __future__ import annotations

import os

from april.commands import rank
from april.commands.rank import leave
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training.agent import Agent
from april.training.rank_process import Report, is_rank


def start(recipe: Recipe, resume: bool = False) -> int:
    """Train, and return the exit status. A process that torchrun started is one of the ranks, and ends here.

    Args:
        recipe: a checked one.
        resume: go on with the run in the recipe's directory.

    Raises:
        ConfigError: torchrun started another number of processes than the recipe says.
    """
    if recipe.trainer.sharded and not is_rank():
        return Agent(recipe).run(resume)
    if recipe.trainer.sharded:
        if (world := int(os.environ["WORLD_SIZE"])) != recipe.trainer.processes:
            raise ConfigError(
                f"trainer.processes = {recipe.trainer.processes}, but torchrun started {world} processes: set "
                "one of them to the other"
            )
        leave(rank.train(recipe, resume, Report()))
    from april.commands.trainer import run_trainer  # imports torch and transformers, which an agent does without

    return run_trainer(recipe, resume)
