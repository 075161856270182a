"""Samples in flight in the simulated engine, one row each."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from april.engines.chunk_queue import parted
from april.rollout.engine import Chunk, Fault, make_chunk
from april.rollout.sampling import FinishReason
from april.simulation.blank import blank

COLUMNS = ("prompt", "group", "total", "done", "limit", "held", "sent")


class SampleTable:
    """Columns of numbers, and the chunks that are to be handed out. Rows are reused once nothing is in flight.

    Attributes:
        ids: sample ids, by row.
        prompt: tokens of the prompt.
        group: number of the prompt, by which samples of a group are known.
        total: response tokens at which this request ends.
        done: response tokens before the sample was admitted last.
        limit: response tokens that the budget allows.
        held: tokens of KV cache that a waiting sample has on its replica.
        sent: response tokens that were handed out.
        last: whether the episode ends with this request; true without episodes.
        version: policy version of the tokens.
        chunks: not taken yet.
    """

    prompt: NDArray[np.int64]
    group: NDArray[np.int64]
    total: NDArray[np.int64]
    done: NDArray[np.int64]
    limit: NDArray[np.int64]
    held: NDArray[np.int64]
    sent: NDArray[np.int64]
    last: NDArray[np.bool_]

    def __init__(self) -> None:
        self.version = 0
        self.chunks: list[Chunk] = []
        self.clear()

    def clear(self) -> None:
        self.ids: list[str] = []
        for name in COLUMNS:
            setattr(self, name, np.zeros(0, np.int64))
        self.last = np.zeros(0, np.bool_)

    def add(self, ids: Iterable[str], last: NDArray[np.bool_], **columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append samples, given every one of `COLUMNS`, and return their rows."""
        first = len(self.ids)
        self.ids.extend(ids)
        for name in COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), columns[name])))
        self.last = np.concatenate((self.last, last))
        return np.arange(first, len(self.ids))

    def named(self, rows: NDArray[np.int64], sample_ids: Container[str] | None) -> NDArray[np.bool_]:
        """Return which of `rows` are samples of `sample_ids`; all of them if None."""
        if sample_ids is None:
            return np.ones(len(rows), np.bool_)
        return np.array([self.ids[row] in sample_ids for row in rows.tolist()], np.bool_)

    def hand_out(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], finish: Iterable[FinishReason | None] = repeat(None)
    ) -> None:
        """Make a chunk of `tokens[i]` tokens for the sample in `rows[i]`."""
        blanks = list(map(blank, tokens.tolist()))
        ids = [self.ids[row] for row in rows.tolist()]
        rest = repeat(None), repeat(Fault.UNKNOWN), repeat(None)
        fields = zip(ids, blanks, blanks, repeat(self.version), finish, *rest)
        self.chunks += map(make_chunk, fields)

    def take_chunks(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        chunks, self.chunks = parted(self.chunks, sample_ids)
        return chunks
