"""Start of a run's processes: this one, or several ranks."""

from __future__ import annotations

import faulthandler
import os

from april.commands import rank
from april.commands.rank import leave
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training.device_map import device_map
from april.training.megatron_package import check_megatron
from april.training.rank_protocol import StatusReporter, is_rank, torchrun_id, torchrun_restarts
from april.training.rank_supervisor import RankSupervisor


def check_ranks(recipe: Recipe) -> None:
    """Check that there are enough GPUs, that the packages of ranks are installed, and that torchrun, if it started
    this process, starts the recipe's number of ranks.

    Raises:
        ConfigError: they do not, or it is not, or it does not, or the ranks would not know their run.
    """
    check_megatron(recipe.trainer.backend)
    device_map(recipe)
    if not is_rank():
        return
    if (world := int(os.environ["WORLD_SIZE"])) != recipe.trainer.processes:
        raise ConfigError(
            f"trainer.processes = {recipe.trainer.processes}, but torchrun started {world} processes: set one of them "
            "to the other"
        )
    if recipe.ranks_on_nodes:
        raise ConfigError(
            'cluster.ranks = "nodes", but torchrun has started the ranks: remove it, or start april train'
        )
    if recipe.shares_devices and recipe.cluster.enabled and os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        raise ConfigError(
            'trainer.layout = "shared" with cluster.address: torchrun started ranks on several machines, whose GPUs '
            'the cluster does not know; start april train with cluster.ranks = "nodes"'
        )
    if torchrun_restarts() and torchrun_id() is None:
        raise ConfigError(
            "ranks that torchrun starts anew know their run by the job's id: add --rdzv-id ID, which no other job has, "
            "or --max-restarts 0"
        )


def start(recipe: Recipe, resume: bool = False) -> int:
    """Train, and return the exit status. A process started by torchrun is a rank and exits here.

    Args:
        recipe: one that was checked, as `check_ranks` does, too.
        resume: resume the run in the recipe's directory.
    """
    if recipe.trainer.sharded and is_rank():
        faulthandler.enable()
        leave(rank.train(recipe, resume, StatusReporter()))
    if recipe.trainer.sharded:
        return RankSupervisor(recipe).run(resume)
    from april.commands.trainer import (
        run_trainer,
    )  # imports torch and transformers, which the supervisor of ranks does not need

    return run_trainer(recipe, resume)
