"""Support sets: the tokens that top-p and top-k left to sample from, at each position of a response.

slime's trainer computes log-probabilities over these tokens only.

Invariants:
- the support set of a position is the one that the server sent together with the token at that position, and contains
  that token;
- a new support set replaces the sets of its position and of all later positions: a lost token is sampled again.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec

from april.engines.servers.client import RequestError


class Meta(msgspec.Struct, gc=False):
    output_token_sampling_mask: list[list[int]] | None = None


class Event(msgspec.Struct, gc=False):
    """Fields of an SGLang event that hold support sets."""

    meta_info: Meta


decode = msgspec.json.Decoder(Event).decode


class SupportSets:
    """Support sets of all unfinished samples, by sample id."""

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._rows: dict[str, list[array[int]]] = {}
        for id, rows in (saved or {}).items():
            token_ids, counts = array("i", base64.b64decode(rows["token_ids"])), rows["counts"]
            self._rows[id], start = [], 0
            for count in counts:
                self._rows[id].append(token_ids[start : start + count])
                start += count

    def read(self, event: bytes, sample_id: str, position: int, drawn: Sequence[int]) -> None:
        """Store the support sets of an event's tokens.

        Args:
            position: position of the first token of `drawn` in the sample, prompt included.
            drawn: tokens of the event.

        Raises:
            RequestError: the event lacks the support set of a token.
        """
        rows = (decode(event).meta_info.output_token_sampling_mask or [])[-len(drawn) :]
        if len(rows) != len(drawn) or not all(token in row for token, row in zip(drawn, rows, strict=True)):
            raise RequestError("the event does not list the tokens that top_p kept")
        known = self._rows.setdefault(sample_id, [array("i")] * position)  # prompt tokens have no support set
        assert position <= len(known), "an event continues behind the stored positions"
        known[position:] = [array("i", row) for row in rows]

    def of(self, sample_id: str, prompt_length: int, length: int) -> tuple[list[int], list[int]]:
        """Return a response's support sets concatenated, and their offsets, in slime's format: the last offset is the
        total length.

        Args:
            length: tokens of the response. The server may have drawn more behind a stop string.
        """
        rows = self._rows[sample_id][prompt_length : prompt_length + length]
        assert len(rows) == length, "every token of the response was read"
        assert all(rows), "every position has a support set"
        return list(chain.from_iterable(rows)), [0, *accumulate(map(len, rows))]

    def keep(self, sample_ids: Collection[str]) -> None:
        """Drop the support sets of all other samples."""
        self._rows = {id: rows for id, rows in self._rows.items() if id in sample_ids}

    def state_dict(self) -> dict[str, Any]:
        """Return the support sets as JSON types."""
        return {
            id: {
                "token_ids": base64.b64encode(b"".join(row.tobytes() for row in rows)).decode(),
                "counts": list(map(len, rows)),
            }
            for id, rows in self._rows.items()
        }
