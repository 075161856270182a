"""How many sampled chunks a second the scheduler puts into their samples, without what the engine of
`scheduler_throughput.py` takes to make them: the fastest poll of a few runs.

It also measures older versions, in which the scheduler absorbed chunks itself, for `house.py`.

    python benchmarks/absorb.py
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from scheduler_throughput import GROUPS, SIZE, FreeEngine, measure

try:
    from april.rollout.generation.generation import Generation as Absorbing

    NAME = "absorb"
except ImportError:
    from april import RolloutScheduler as Absorbing  # type: ignore[assignment]

    NAME = "_absorb"


def main() -> None:
    absorb, rates = getattr(Absorbing, NAME), []

    def timed(self: Any, chunks: Any) -> None:
        began = time.process_time()
        absorb(self, chunks)
        seconds = time.process_time() - began
        if len(chunks) > GROUPS * SIZE // 2 and not any(chunk.finish for chunk in chunks):
            rates.append(len(chunks) / seconds)

    setattr(Absorbing, NAME, timed)
    for _ in range(4):
        asyncio.run(measure(FreeEngine(), 2))
    print(f"fastest poll: {max(rates):,.0f} chunks/s")


if __name__ == "__main__":
    main()
