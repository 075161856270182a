"""The cost model of the simulated engine: seconds that each kind of work takes.

One engine is one replica: the GPUs that hold one copy of the weights. A decode step of `b` samples that hold `k` tokens
of KV cache together takes base(b) + k * kv_token_seconds: the linear layers, whose cost depends on the batch only, and
attention, which reads the cache. Prefill of n tokens stalls decoding for n * prefill_token_seconds
+ n * n * prefill_pair_seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class CostModelError(Exception):
    """A file that is not a valid cost model."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs and capacity of one engine, all times in seconds.

    Args:
        slots: samples that decode together.
        kv_tokens: capacity of the KV cache, in tokens.
        decode_batches, decode_seconds: base(b) at some batch sizes; linear between them, and beyond the last two.
        kv_token_seconds: added to a decode step for each token of KV cache that the running samples hold.
        prefill_token_seconds: prefill, for each token.
        prefill_pair_seconds: prefill, for each token times each token: attention.
        request_seconds: admission of a sample, without its prefill.
        prefix_caching: samples of one group that are admitted one after another prefill their prompt once.
        update_seconds: one weight update.
        interrupt_seconds: from an interrupt to the last partial response.
        source: origin of the figures.
        errors: relative error of the fit, by kind of measurement.
    """

    slots: int
    kv_tokens: int
    decode_batches: tuple[int, ...]
    decode_seconds: tuple[float, ...]
    kv_token_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    prefill_pair_seconds: float = 0.0
    request_seconds: float = 0.0
    prefix_caching: bool = True
    update_seconds: float = 0.0
    interrupt_seconds: float = 0.0
    source: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        require(_whole(self.slots), "slots", "an engine needs a whole number of them, at least one")
        require(_whole(self.kv_tokens), "kv_tokens", "must be a whole number, at least one")
        require(len(self.decode_batches) >= 1, "decode_batches", "needs at least one batch size")
        require(all(map(_whole, self.decode_batches)), "decode_batches", "must be whole numbers, at least one")
        require(list(self.decode_batches) == sorted(set(self.decode_batches)), "decode_batches", "must go up")
        matching = len(self.decode_seconds) == len(self.decode_batches)
        require(matching, "decode_seconds", "needs one entry for each of decode_batches")
        require(all(_finite(s) and s > 0 for s in self.decode_seconds), "decode_seconds", "must be positive numbers")
        for name in COSTS:
            seconds = getattr(self, name)
            require(_finite(seconds) and seconds >= 0, name, "must be a number, not negative")
        require(isinstance(self.prefix_caching, bool), "prefix_caching", "must be true or false")

    def base(self, slots: int | None = None) -> NDArray[np.float64]:
        """Return seconds of a decode step without its attention, by batch size, shape [slots + 1]; entry 0 is 0."""
        batches, seconds = np.array(self.decode_batches, float), np.array(self.decode_seconds)
        sizes = np.arange((slots or self.slots) + 1, dtype=float)
        base: NDArray[np.float64] = np.interp(sizes, batches, seconds)
        if len(batches) > 1:
            # Never negative: noise in the last two measurements must not make larger batches faster.
            slope = max((seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2]), 0.0)
            base += slope * np.maximum(sizes - batches[-1], 0.0)
        base[0] = 0.0
        return base

    def ceiling(self, mean_kv_tokens: float, slots: int | None = None) -> float:
        """Return tokens per second while every slot decodes and the engine does nothing else.

        Args:
            mean_kv_tokens: mean tokens of KV cache of a running sample.
            slots: running samples; None for all that fit.
        """
        slots = slots or int(min(self.slots, max(self.kv_tokens / max(mean_kv_tokens, 1.0), 1)))
        return float(slots / (self.base(slots)[slots] + self.kv_token_seconds * slots * mean_kv_tokens))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Load a file written by `save`.

        Raises:
            CostModelError: the file does not exist or is not a valid cost model; the message names the field.
        """
        try:
            state: Any = json.loads(path.read_text())
        except OSError as error:
            raise CostModelError(f"{path}: cannot read this cost model: {error.strerror}") from None
        except ValueError as error:
            raise CostModelError(f"{path}: no valid JSON: {error}") from None
        if not isinstance(state, dict):
            raise CostModelError(f"{path}: a cost model is a JSON object")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(state) - known):
            raise CostModelError(f"{path}: unknown field {unknown[0]}; a cost model has {', '.join(sorted(known))}")
        try:
            for name in ("decode_batches", "decode_seconds"):
                state[name] = tuple(state[name])
            return cls(**state)
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(f"{path}: no cost model: {error}") from None


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


COSTS = (
    "kv_token_seconds",
    "prefill_token_seconds",
    "prefill_pair_seconds",
    "request_seconds",
    "update_seconds",
    "interrupt_seconds",
)
