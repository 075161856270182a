"""Builder of the ranks of a run: rank 0 leads, the other ranks follow.

Invariant: before a model is loaded, the ranks have checked that they have the same recipe and package versions.
"""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from april import __version__
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.images.store import ImageStore
from april.training.distributed_learner import DistributedLearner, follow_commands
from april.training.embedded_engine import embedded
from april.training.learner_objective import check_checkpoint_of
from april.training.learner_settings import LearnerSettings
from april.training.megatron_package import MEGATRON, check_megatron
from april.training.model_parallel import check_layout
from april.training.policy import load_policy
from april.training.rank_engine import FollowerEngine
from april.training.rank_protocol import is_rank
from april.training.ranks import Ranks, join_ranks
from april.training.run_images import run_images
from april.training.sharded import ShardedLearner
from april.training.stop import SIGNALS


@contextmanager
def open_distributed_learner(
    recipe: Recipe, directory: Path, checkpoint: Path | None, images: ImageStore | None = None
) -> Iterator[tuple[DistributedLearner, Any]]:
    """Yield the learner of rank 0, which leads the other ranks, and the policy's tokenizer.

    Args:
        directory: the run's directory.
        checkpoint: checkpoint to resume from; None for a new run.
        images: images of prompts; the other ranks have their own.

    Raises:
        ConfigError: ranks differ, or the policy does not load.
        RankLostError: a rank did not join in time.
    """
    if not is_rank():
        raise ConfigError(f"trainer.backend = {recipe.trainer.backend!r} takes ranks: start the run by april train")
    with _joined(recipe) as ranks:
        # Followers load the leader's choice, so that all ranks resume from the same checkpoint.
        ranks.send(checkpoint)
        learner, tokenizer = _part(recipe, ranks, directory, checkpoint, images)
        with DistributedLearner(learner, ranks, directory) as leader:
            yield leader, tokenizer


def run_follower(recipe: Recipe) -> None:
    """Run a follower until the leader shuts it down.

    Raises:
        ConfigError: ranks differ, or the policy does not load.
        RankLostError: another rank is gone.
    """
    if recipe.training.threads:
        torch.set_num_threads(recipe.training.threads)
    with _joined(recipe) as ranks:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the leader decides when the run ends
        checkpoint: Path | None = ranks.receive()
        found = run_images(recipe, checkpoint)
        images = found if isinstance(found, ImageStore) else None
        learner, _ = _part(recipe, ranks, None, checkpoint, images)

        def engine() -> EmbeddedEngine:
            return embedded(recipe, learner.served, beside_trainer=True, images=images)

        follow_commands(learner, ranks, FollowerEngine(engine, ranks))


def _joined(recipe: Recipe) -> AbstractContextManager[Ranks]:
    trainer = recipe.trainer
    layout = (trainer.policy_replicas, trainer.context_parallel, trainer.tensor_parallel, trainer.expert_parallel)
    return join_ranks(recipe.model.device, trainer.rank_timeout, *layout)


def _part(
    recipe: Recipe, ranks: Ranks, directory: Path | None, checkpoint: Path | None, images: ImageStore | None
) -> tuple[ShardedLearner, Any]:
    check_megatron(recipe.trainer.backend)
    _check_alike(recipe, ranks)
    check_layout(recipe.trainer, recipe.model.path)
    settings = LearnerSettings.of(recipe)
    if checkpoint:
        check_checkpoint_of(settings, checkpoint)
    start = None if recipe.lora.rank else checkpoint  # adapters are added to the policy they were trained from
    # In main memory: a rank's GPU may have room for its shard only, not for the whole policy.
    model, tokenizer = load_policy(recipe.model, start, torch.device("cpu"))
    torch.manual_seed(recipe.training.seed)  # adapters are initialised at random, equally on all ranks
    kind: type[ShardedLearner] = ShardedLearner
    if recipe.trainer.backend == "megatron":
        from april.training.megatron_learner import MegatronLearner as kind  # needs packages of its own
    return kind(model, settings, ranks, tokenizer, directory, images), tokenizer


def _check_alike(recipe: Recipe, ranks: Ranks) -> None:
    """Check that all ranks have the leader's recipe and package versions.

    Raises:
        ConfigError: a rank differs.
    """
    needed: tuple[str, ...] = ("torch", "transformers", "numpy", "safetensors")
    needed += MEGATRON if recipe.trainer.backend == "megatron" else ()
    packages = {name: version(name) for name in needed}
    own = {"april": __version__, "python": platform.python_version(), **packages}
    first, *others = ranks.gathered({**own, "recipe": json.dumps(recipe.to_dict(), sort_keys=True)})
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                difference = "another recipe" if name == "recipe" else f"{name} {other[name]}, not {value}"
                raise ConfigError(
                    f"rank {rank} has {difference}: ranks must be alike; start all from the same environment"
                )
