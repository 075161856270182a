"""What a run holds in memory, as metrics of each step: so that N' can be weighed by it."""

from __future__ import annotations

import resource
import sys
from typing import Any

from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine

TOKEN_BYTES = 72
"""Of a buffered token at most: two places in lists, an int and a float, as CPython has them on 64 bits."""


def memory_metrics(step: RolloutBatch, engine: Engine) -> dict[str, Any]:
    """Bytes.

    - `buffer_bytes`: of the responses that stay under way after the step, at most;
    - `kv_cache_bytes`: the most that keys and values have taken so far; None where the engine does not say;
    - `resident_bytes`: the most that this process has had in main memory so far, model and optimizer included.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "buffer_bytes": step.buffered_tokens * TOKEN_BYTES,
        "kv_cache_bytes": getattr(engine, "kv_cache_bytes", None),
        "resident_bytes": peak if sys.platform == "darwin" else 1024 * peak,
    }
