"""Memory metrics of each step, as a basis for choosing N'."""

from __future__ import annotations

import resource
import sys
from typing import Any

from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine

TOKEN_BYTES = 72
"""Upper bound for a buffered token: two list entries, an int and a float of CPython on 64 bits."""


def memory_metrics(step: RolloutBatch, engine: Engine) -> dict[str, Any]:
    """Return memory in bytes.

    - `buffer_bytes`: upper bound for the unfinished responses after the step;
    - `kv_cache_bytes`: peak of the KV cache so far; None if the engine does not report it;
    - `resident_bytes`: peak resident memory of this process so far, model and optimizer included.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "buffer_bytes": step.buffered_tokens * TOKEN_BYTES,
        "kv_cache_bytes": getattr(engine, "kv_cache_bytes", None),
        "resident_bytes": peak if sys.platform == "darwin" else 1024 * peak,
    }
