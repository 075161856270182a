"""Rank 0 answers the training loop and leads the other ranks: each call there is a command for all.

Invariants:
- the ranks do the same calls with the same arguments in the same order, whichever threads here they come from;
- a command is done on all ranks or the ranks are done with: what one raises for a reason of its own ends them all;
- after a command that failed nothing is said to the others any more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine
from april.training.rank_engine import FollowerEngine, all_engines
from april.training.rank_protocol import RankLostError
from april.training.ranks import Ranks, rank_loss_translated
from april.training.sharded import ShardedLearner
from april.training.weight_transfer import weight_transfer

GENERATE = "generate"
"""The one command that is not the learner's."""


class DistributedLearner:
    """The `Learner` that rank 0 shows the loop.

    Args:
        learner: rank 0's own part.
        ranks: all of them.
        recipe: the run's.
        directory: the run's, too.
    """

    def __init__(self, learner: ShardedLearner, ranks: Ranks, recipe: Recipe, directory: Path) -> None:
        self._learner = learner
        self._ranks = ranks
        adapters_alone = recipe.engine.weight_transfer == "adapters"
        save = functools.partial(self._all, "save_adapters" if adapters_alone else "save_weights")
        self._transfer = weight_transfer(recipe, self._tensors, save, directory, ranks.device, learner.parts)
        self._lock = threading.Lock()
        self._broken = False

    @property
    def context_length(self) -> int | None:
        return self._learner.context_length

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._learner.stop_token_ids

    @property
    def served(self) -> Any:
        return self._learner.served

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        self._transfer.withdraw()
        metrics: dict[str, float] = self._all("train", _trained_on(step), number)
        return metrics

    def interrupt(self) -> None:
        self._learner.interrupt()

    def weights(self, version: int) -> Any:
        if self.served is not None:
            return self._all("refresh")  # its engine computes with the copy itself
        return self._transfer.offer(version)

    @contextmanager
    def generating(self, own: Engine) -> Iterator[Engine]:
        """The engine of the run, given the leader's `own`: those of all ranks as one, if it computes with a copy."""
        if self.served is None or self._ranks.world == 1:
            yield own
            return
        assert isinstance(own, EmbeddedEngine)
        with self._lock, rank_loss_translated():
            self._ranks.send((GENERATE, ()))
        with all_engines(own, self._ranks) as engine:
            yield engine

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._learner.buckets():
            yield from self._all("gather", names)

    def save(self, directory: Path) -> None:
        self._all("save", directory)

    def load(self, directory: Path) -> None:
        self._all("load", directory)

    def _all(self, name: str, *arguments: Any) -> Any:
        with self._lock, rank_loss_translated():
            if self._broken:
                raise RankLostError("the ranks have lost one another")
            try:
                self._ranks.send((name, arguments))
                return getattr(self._learner, name)(*arguments)
            except BaseException:
                self._broken = True
                raise

    def __enter__(self) -> DistributedLearner:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Tell the followers to end, unless a command has failed; a follower that is gone already is ignored."""
        if not self._broken:
            with suppress(RuntimeError):
                self._ranks.send(None)


def follow_commands(learner: ShardedLearner, ranks: Ranks, engine: FollowerEngine) -> None:
    """Do as the leader says until it dismisses this rank.

    Raises:
        RankLostError: another rank is gone.
    """
    with rank_loss_translated():
        while (command := ranks.receive()) is not None:
            name, arguments = command
            if name == GENERATE:
                engine.start()
            else:
                getattr(learner, name)(*arguments)
    engine.join()


def _trained_on(step: RolloutBatch) -> RolloutBatch:
    """What a learner looks at of a step: without what tasks keep beside prompts, which may be of any kind."""
    groups = [replace(group, prompt=replace(group.prompt, metadata={})) for group in step.groups]
    return RolloutBatch(step.version, step.plan, groups)
