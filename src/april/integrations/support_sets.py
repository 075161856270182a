"""The tokens that top-p and top-k left to be drawn at each place of a response, which slime's trainer scores under.

Invariants:
- a place's tokens are those that the server named when it sent the token that stands there, which is one of them;
- what comes for a place replaces what was there for it and behind it: a token that was lost is sampled again.
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
    """What is read of SGLang's event beside its tokens."""

    meta_info: Meta


decode = msgspec.json.Decoder(Event).decode


class Kept:
    """Those of all samples under way, by the sample's name."""

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._rows: dict[str, list[array[int]]] = {}
        for id, rows in (saved or {}).items():
            token_ids, counts = array("i", base64.b64decode(rows["token_ids"])), rows["counts"]
            self._rows[id], start = [], 0
            for count in counts:
                self._rows[id].append(token_ids[start : start + count])
                start += count

    def read(self, event: bytes, sample_id: str, place: int, drawn: Sequence[int]) -> None:
        """Take up what an event says.

        Args:
            place: of the first of the `drawn` tokens in the sample, prompt included.

        Raises:
            RequestError: it does not say it of every token.
        """
        rows = (decode(event).meta_info.output_token_sampling_mask or [])[-len(drawn) :]
        if len(rows) != len(drawn) or not all(token in row for token, row in zip(drawn, rows, strict=True)):
            raise RequestError("the event does not say which tokens top_p kept")
        known = self._rows.setdefault(sample_id, [array("i")] * place)  # of a prompt's tokens there is nothing to say
        assert place <= len(known), "what is sampled goes on behind what is known"
        known[place:] = [array("i", row) for row in rows]

    def of(self, sample_id: str, prompt_length: int) -> tuple[list[int], list[int]]:
        """The kept tokens of a response one after another, and where those of each place begin, as slime has them:
        one offset more than there are places."""
        rows = self._rows[sample_id][prompt_length:]
        assert all(rows), "the kept tokens of every place are known"
        return list(chain.from_iterable(rows)), [0, *accumulate(map(len, rows))]

    def leave(self, sample_ids: Collection[str]) -> None:
        """Only these samples are under way."""
        self._rows = {id: rows for id, rows in self._rows.items() if id in sample_ids}

    def state_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            id: {
                "token_ids": base64.b64encode(b"".join(row.tobytes() for row in rows)).decode(),
                "counts": list(map(len, rows)),
            }
            for id, rows in self._rows.items()
        }
