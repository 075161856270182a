"""The embedded engine against transformers' continuous batching: the same requests, slots and budgets, interleaved."""

from __future__ import annotations

from embedded_engine import Workload, continuous, embedded, requests_of, seconds
from gpu_parts.bench import Bench
from parts import Figures
from record import spread


def measure(bench: Bench) -> Figures:
    model = bench.model(bench.shape)
    work = Workload(
        bench.shape.name,
        {"vocab_size": bench.shape.vocabulary},
        requests=bench.size(128, 8),
        slots=bench.size(64, 4),
        median=bench.size(96, 8),
        longest=bench.size(384, 24),
        batch_tokens=bench.size(2048, 64),
    )
    asked = requests_of(work)
    useful = sum(request.budget for request in asked)
    yield "useful_tokens", useful
    makers = {"embedded": embedded, "continuous": continuous}
    for make in makers.values():
        make(model, work, asked[:4])()
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(bench.size(2, 1)):
        for name, make in makers.items():
            times[name].append(seconds(make(model, work, asked), useful))
            yield (
                "useful_tokens_per_second",
                {name: spread([useful / t for t in taken]) for name, taken in times.items() if taken},
            )
    ratios = [b / a for a, b in zip(times["embedded"], times["continuous"], strict=True)]
    yield "embedded_over_continuous", spread(ratios)
