"""Completions of fixed tokens, which some of TRL's tests get by replacing `model.generate`, for april's engine.

The replacement answers the first call, with the rows of a batch, and a second one, with fewer rows, for completions
that called a tool. It returns tokens of Qwen's vocabulary; `tiny_hub.token_of` maps them to the tiny tokenizers'.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import torch

from april import Chunk, FinishReason, Sample
from april.integrations.trl import rollouts
from april.rollout.wrapped_engine import WrappedEngine

END = 151645
"""Token of Qwen that ends a turn."""


CALLED = 2
"""Completions that called a tool, in each of the tests."""


class FixedTokens(WrappedEngine):
    """Answers with the completions that replace `model.generate`.

    Args:
        rows: completions that a call for a batch gives.
        group_size: completions of a prompt. The first prompt that is different from earlier ones gets the next group.
    """

    def __init__(self, engine: Any, model: Any, token_of: Any, rows: int, group_size: int) -> None:
        super().__init__(engine)
        self.model, self.token_of, self.rows, self.group_size = model, token_of, rows, group_size
        self.version = 0
        self.given: list[Chunk] = []
        self.kinds: dict[tuple[int, ...], int] = {}

    @property
    def running(self) -> int:
        return len(self.given)

    def submit(self, sample: Sample) -> None:
        assert isinstance(self.model.generate, mock.Mock), "the test does not replace model.generate any more"
        kinds = self.rows // self.group_size
        kind = self.kinds.setdefault(sample.prompt_ids, len(self.kinds)) % kinds
        again = bool(sample.turns)
        asked = torch.zeros((CALLED if again else self.rows, 1), dtype=torch.long)
        row = kind if again else kind * self.group_size + sample.index
        fixed = self.model.generate(input_ids=asked)[row, 1:].tolist()
        ended = END in fixed
        tokens = [self.token_of(token) for token in (fixed[: fixed.index(END) + 1] if ended else fixed)]
        finish = FinishReason.STOP if ended else FinishReason.LENGTH
        logprobs = self._logprobs([*sample.prompt_ids, *sample.response_ids], tokens)
        self.given.append(Chunk(sample.id, tokens, logprobs, self.version, finish))

    def _logprobs(self, before: Sequence[int], tokens: Sequence[int]) -> list[float]:
        whole = torch.tensor([[*before, *tokens]])
        with torch.no_grad():
            scores = self.model(whole).logits[0, len(before) - 1 : -1].float().log_softmax(-1)
        return scores.gather(-1, whole[0, len(before) :, None])[:, 0].tolist()

    async def poll(self) -> list[Chunk]:
        given, self.given = self.given, []
        return given

    async def interrupt(self, sample_ids: Any = None) -> list[Chunk]:
        return await self.poll()

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await super().update_weights(version, weights)
        self.version = version


def fixed_tokens(rows: int, group_size: int, token_of: Any) -> Any:
    """Return a patch under which engines that april opens answer with fixed tokens."""
    opened = rollouts.open_engine

    @asynccontextmanager
    async def open_fixed(recipe: Any, model: Any, *more: Any, **options: Any) -> AsyncIterator[FixedTokens]:
        async with opened(recipe, model, *more, **options) as engine:
            yield FixedTokens(engine, model, token_of, rows, group_size)

    return mock.patch.object(rollouts, "open_engine", open_fixed)
