"""Routes: for each token of a sample the experts that computed it, in every layer with a router.

Row i is of the forward pass that consumed token i, of prompt and response together, and predicted token i + 1. The last
token of a sample was not consumed, so a sample of n tokens has at most n - 1 rows. The last token of an interrupted
response is consumed when the sample is resumed: its row is of the newer policy version, as token i + 1 is.

Invariants:
- a row is whole or unknown, and an unknown row has `unknown(dtype)` everywhere;
- with "recorded", a row of the version that drew token i + 1 is never replaced, and no other version fills it in,
  unless the rollouts' `fill_routes` is set; rows that were filled in are counted;
- rows that `frozen` has returned never change: a thread writes them to disk while generation continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

RouterReplay = Literal["off", "recorded", "latest"]
"""Values of the setting `training.router_replay`.

off: keep no routes. recorded: for each token the routes of the version that drew it. latest: the newest routes of each
token; they differ from recorded ones where a resumed sample was prefilled by newer weights.
"""

Experts = NDArray[np.uint8] | NDArray[np.uint16]
"""Indices of experts, [rows, layers, top k]."""


def route_dtype(experts: int) -> np.dtype[Any]:
    """Return the type of the routes of layers with `experts` experts; its largest value is reserved."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16)


def unknown(dtype: np.dtype[Any]) -> int:
    """Return the reserved value of rows that no engine has supplied."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class RouteRows:
    """Consecutive rows that an engine supplies for a sample."""

    start: int
    """Place of the first row: of a token of prompt and response together."""
    experts: Experts

    @property
    def end(self) -> int:
        return self.start + len(self.experts)

    def up_to(self, end: int) -> RouteRows | None:
        """Return the rows of tokens before place `end`; None if there are none."""
        return RouteRows(self.start, self.experts[: end - self.start]) if end > self.start else None

    def followed_by(self, rows: RouteRows) -> RouteRows:
        """Return these rows and the ones behind them, if there is no gap."""
        if rows.start != self.end:
            return self
        both: Any = (self.experts, rows.experts)
        return RouteRows(self.start, np.concatenate(both))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RouteRows) and self.start == other.start and _same(self.experts, other.experts)


class Routes:
    """The rows of one sample from token 0 on."""

    __slots__ = ("_frozen", "_held", "length")

    def __init__(self, experts: Experts) -> None:
        self._held = experts
        """Rows, with room for more behind `length`."""
        self.length = len(experts)
        self._frozen = 0
        """Rows that others hold as well: they are copied before one of them is replaced."""

    @property
    def experts(self) -> Experts:
        """All rows, [length, layers, top k]; unknown ones have the reserved value."""
        return self._held[: self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without room for more."""
        return int(self.experts.nbytes)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which rows are known, [length]."""
        known: NDArray[np.bool_] = self.experts[:, 0, 0] != unknown(self._held.dtype)
        return known

    @classmethod
    def like(cls, rows: RouteRows) -> Self:
        """Return routes without rows, of the shape of `rows`."""
        return cls(np.empty((0, *rows.experts.shape[1:]), rows.experts.dtype))

    def check(self, rows: RouteRows) -> None:
        """Check that rows are of the same layers, top k and number of experts as those before.

        Raises:
            ValueError: they are not.
        """
        own, other = self._held, rows.experts
        if own.shape[1:] != other.shape[1:] or own.dtype != other.dtype:
            raise ValueError(
                f"routes of {_named(other)} came where earlier ones have {_named(own)}: they are of another model"
            )

    def put(self, rows: RouteRows, accepted: NDArray[np.bool_] | None = None) -> None:
        """Write rows, of which only those `accepted` if given; rows between the last one and these are unknown."""
        start, end = rows.start, rows.end
        if end > len(self._held):
            # Larger by a half, so that a row is copied a few times at most.
            grown = np.full((end + end // 2, *self._held.shape[1:]), unknown(self._held.dtype), self._held.dtype)
            grown[: self.length] = self._held[: self.length]
            self._held, self._frozen = grown, 0
        elif start < self._frozen:
            self._held, self._frozen = self._held.copy(), 0
        self.length = max(self.length, end)
        if accepted is None:
            self._held[start:end] = rows.experts
        else:
            self._held[start:end][accepted] = rows.experts[accepted]

    def trim(self) -> None:
        """Release the room for more rows."""
        if len(self._held) > self.length:
            self._held, self._frozen = self._held[: self.length].copy(), 0

    def frozen(self) -> Routes:
        """Return the present rows, without a copy; rows that are added or replaced later are not in them."""
        self._frozen = self.length
        rows = Routes(self.experts)
        rows._frozen = rows.length
        return rows

    def outline(self) -> Routes:
        """Return routes of the same length without content, for a process that reads the length alone."""
        empty = object.__new__(Routes)
        empty._held, empty.length = np.empty((0, *self._held.shape[1:]), self._held.dtype), self.length
        empty._frozen = 0
        return empty

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routes) and _same(self.experts, other.experts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Routes({self.length} rows of {_named(self._held)})"


def encode_experts(experts: Experts) -> memoryview:
    """Return the bytes of an array, little-endian, if possible without a copy."""
    stored = np.ascontiguousarray(experts.astype(experts.dtype.newbyteorder("<"), copy=False))
    return stored.reshape(-1).view(np.uint8).data


def decode_experts(content: bytes | memoryview, shape: Any, dtype: str, copy: bool = True) -> Experts:
    """Return the array whose bytes, little-endian, are `content`.

    Args:
        copy: return an array of its own; with False, it may be a view of `content`.

    Raises:
        ValueError: the type is neither uint8 nor uint16, or the bytes do not fit the shape.
    """
    if dtype not in ("uint8", "uint16"):
        raise ValueError(f"routes of type {dtype}")
    stored = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return stored.astype(np.dtype(dtype), copy=copy)


def _named(experts: Experts) -> str:
    return f"{experts.shape[1]} layers and {experts.shape[2]} experts a token ({experts.dtype.name})"


def _same(one: Experts, other: Experts) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)
