"""A reward with additional data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with additional data: `info` holds its components and other values to keep with the sample, as JSON
    types. The numbers in `info` become the metrics `reward/<name>`."""

    value: float
    info: Mapping[str, Any] = field(default_factory=dict)
