"""Learner of rank 0: each call of the training loop is a command that all ranks execute.

Invariants:
- all ranks make the same calls in the same order, for calls from any thread of rank 0, and with the same arguments, but
  for what only rank 0 needs or sends later;
- a command succeeds on all ranks, or its error ends all ranks;
- after a failed command no more commands are sent.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from april.engines.embedded import EmbeddedEngine
from april.engines.weight_transfer import BUCKET_BYTES as EXPORTED_BYTES
from april.engines.weight_transfer import Exported
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine
from april.training.offload import EVERY_PART, Part
from april.training.rank_engine import FollowerEngine, all_engines
from april.training.rank_protocol import RankLostError
from april.training.ranks import Ranks, rank_loss_translated
from april.training.sharded import ShardedLearner
from april.training.weight_transfer import weight_transfer

GENERATE = "generate"
"""Command that starts the followers' engines; every other command is the name of a learner's method."""


class DistributedLearner:
    """The `Learner` of rank 0 for the training loop.

    Args:
        learner: rank 0's part of the learner.
        ranks: process groups of all ranks.
        directory: the run's directory.
    """

    def __init__(self, learner: ShardedLearner, ranks: Ranks, directory: Path) -> None:
        self._learner = learner
        self._ranks = ranks
        settings = learner.settings
        adapters_alone = settings.engine.weight_transfer == "adapters"
        save = functools.partial(self._on_all_ranks, "save_adapters" if adapters_alone else "save_weights")
        self._transfer = weight_transfer(
            settings.engine,
            self._tensors,
            save,
            directory,
            ranks.device,
            learner.parts,
            self._exports,
            settings.cluster_dtype,
        )
        self._lock = threading.Lock()
        self._failed = False

    @property
    def context_length(self) -> int | None:
        return self._learner.context_length

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._learner.stop_token_ids

    @property
    def left_out(self) -> Sequence[str]:
        return self._learner.left_out

    @property
    def served(self) -> Any:
        return self._learner.served

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        self._transfer.withdraw()
        metrics: dict[str, float] = self._on_all_ranks("train", for_followers(step), number, own=(step, number))
        return metrics

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores: list[list[float]] = self._on_all_ranks("token_logprobs", sequences)
        return scores

    def interrupt(self) -> None:
        self._learner.interrupt()

    def weights(self, version: int) -> Any:
        if self.served is not None:
            return self._on_all_ranks("refresh")  # engines in the ranks compute with their copies
        return self._transfer.offer(version)

    @contextmanager
    def generating(self, own: Engine) -> Iterator[Engine]:
        """Yield the run's engine: `own`, or the engines of all ranks as one if each rank has a copy of the policy."""
        if self.served is None or self._ranks.world == 1:
            yield own
            return
        assert isinstance(own, EmbeddedEngine)
        # Followers start their engines and then receive engine orders through process groups of their own.
        with self._lock, rank_loss_translated():
            self._ranks.send((GENERATE, ()))
        with all_engines(own, self._ranks) as engine:
            yield engine

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        self._on_all_ranks("to_host", frozenset(parts))

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        self._on_all_ranks("to_device", frozenset(parts))

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes that all processes together hold of each rank's GPU, by its UUID; empty on CPUs."""
        held: dict[str, int] = self._on_all_ranks("device_bytes")
        return held

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._learner.buckets():
            yield from self._on_all_ranks("gather", names)

    def _exports(self) -> Generator[Exported, None, None]:
        try:
            for names in self._learner.buckets(EXPORTED_BYTES):
                yield self._on_all_ranks("export", names)
        finally:
            if not self._failed:
                self._on_all_ranks("release_export")

    def save(self, directory: Path) -> None:
        self._on_all_ranks("save", directory)

    def load(self, directory: Path) -> None:
        self._on_all_ranks("load", directory)

    def _on_all_ranks(self, name: str, *arguments: Any, own: tuple[Any, ...] | None = None) -> Any:
        """Call a method of the learner on all ranks, on rank 0 with the arguments `own` if given."""
        with self._lock, rank_loss_translated():
            if self._failed:
                raise RankLostError("the ranks have lost contact")
            try:
                self._ranks.send((name, arguments))
                return getattr(self._learner, name)(*(arguments if own is None else own))
            # Ranks may be at different points now: a further command would pair unrelated collective operations.
            except BaseException:
                self._failed = True
                raise

    def __enter__(self) -> DistributedLearner:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Make the followers end, unless a command has failed; followers that have ended already are ignored."""
        if not self._failed:
            with suppress(RuntimeError):
                self._ranks.send(None)


def follow_commands(learner: ShardedLearner, ranks: Ranks, engine: FollowerEngine) -> None:
    """Execute the leader's commands until it shuts this rank down.

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


def for_followers(step: RolloutBatch) -> RolloutBatch:
    """Return the step without the prompts' metadata, which learners do not use and which may not be picklable, and
    without the content of routes, which the leader sends with each micro-batch."""
    groups = [
        replace(
            group,
            prompt=replace(group.prompt, metadata={}),
            samples=[sample.with_outlined_routes() for sample in group.samples],
        )
        for group in step.groups
    ]
    return RolloutBatch(step.version, step.plan, groups)
