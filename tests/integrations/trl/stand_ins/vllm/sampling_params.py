"""Names of vLLM's module that TRL and april import."""

from __future__ import annotations

from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class StructuredOutputsParams:
    pass
