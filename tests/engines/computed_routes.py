"""Which policy version computed each token in the embedded engine's KV cache, and the routes that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from april.engines.embedded import EmbeddedEngine
from april.engines.routers import RouteCapture
from april.rollout.trajectory.routes import Experts

CachedBy = list[int]
"""Policy version that computed the keys and values of each token, from token 0 on."""


class CacheLog:
    """Follows the forward passes of an engine that verifies no drafts.

    A list of versions only grows: where tokens are computed again, the sample gets another list.

    Args:
        drawn: receives, for each sample and place of a token, the list at the time when the next token was drawn.
            Engines between which samples move share it.
    """

    def __init__(self, engine: EmbeddedEngine, drawn: dict[str, dict[int, CachedBy]] | None = None) -> None:
        self.newest: dict[str, CachedBy] = defaultdict(list)
        self.all: dict[str, list[CachedBy]] = defaultdict(list)
        self.drawn = defaultdict(dict) if drawn is None else drawn
        self._engine: Any = engine
        self._compute, self._engine._compute = self._engine._compute, self._noted_pass
        scheduler = self._engine._scheduler
        self._copy, scheduler._copy_prompt = scheduler._copy_prompt, self._noted_copy

    def _noted_pass(self) -> Any:
        result = self._compute()
        for sequence, start, tokens in result[1].runs:
            cached, end = self.newest[sequence.id], start + len(tokens)
            assert start <= len(cached), "a token was consumed behind one that was not"
            if start < len(cached) or not cached:
                cached = self._put(sequence.id, cached[:start])
            cached += [self._engine.version] * len(tokens)
            if end == len(sequence.tokens):
                self.drawn.setdefault(sequence.id, {})[end - 1] = cached
        return result

    def _noted_copy(self, source: Any, sequence: Any) -> None:
        copied = self.newest[source.id][: len(sequence.prompt) - 1]
        assert set(copied) == {self._engine.version}, "a new row begins with keys and values of the newest weights"
        self._put(sequence.id, copied)
        self._copy(source, sequence)

    def _put(self, sample_id: str, cached: CachedBy) -> CachedBy:
        self.newest[sample_id] = cached
        self.all[sample_id].append(cached)
        return cached


def computed_routes(policies: Sequence[Any], ids: list[int], cached_by: CachedBy) -> Experts:
    """Return the routes of the first tokens, each computed by its version on the keys and values of those before."""
    cache, rows, start = DynamicCache(config=policies[0].config), list[Experts](), 0
    for version, tokens in groupby(cached_by[: len(ids)]):
        end = start + len(list(tokens))
        rows.append(continued(policies[version], ids[start:end], cache))
        start = end
    return np.concatenate(rows)  # type: ignore[arg-type]


@torch.no_grad()
def continued(policy: Any, ids: list[int], cache: DynamicCache) -> Experts:
    """Return the routes of tokens behind those in the cache, to which they are added."""
    capture = RouteCapture(policy)
    policy(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
    capture.remove()
    experts: Experts = capture.take()
    return experts
