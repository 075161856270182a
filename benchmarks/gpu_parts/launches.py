"""Decode passes of the embedded engine: operators and kernels launched, time, and the share of it that the GPU works.

For samples of like length and for samples of many lengths, which must not cost more launches.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from gpu_parts.bench import Bench, prompts
from parts import Figures
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from april.engines.embedded import EmbeddedEngine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample

FREE = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
"""Operators that launch nothing."""


class Operators(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and not any(name in str(func) for name in FREE)
        return func(*args, **(kwargs or {}))


def measure(bench: Bench) -> Figures:
    model = bench.model(bench.shape)
    counted = {}
    for name, lengths in (("like lengths", [40] * 8), ("many lengths", [bench.size(20 << i, 8 + i) for i in range(7)])):
        found = asyncio.run(passes(bench, model, lengths))
        counted[name] = found["operators"]
        yield name, found
    more = counted["many lengths"] - counted["like lengths"]
    yield "failures", [f"many lengths take {more} operators more"] if bench.on_gpu and more > 0 else []


async def passes(bench: Bench, model: torch.nn.Module, lengths: list[int]) -> dict[str, Any]:
    """Averages over decode passes of one sample of each length."""
    count = bench.size(20, 3)
    engine = EmbeddedEngine(model, max_num_seqs=len(lengths), context_length=bench.size(4096, 256))
    for i, length in enumerate(lengths):
        (prompt,) = prompts(1, length, bench.shape.vocabulary, seed=i)
        engine.submit(Sample(i, 0, prompt.token_ids, SamplingParams(max_tokens=4 * count + 16), i))
    for _ in range(6):  # prefill, and the first passes, which load kernels
        await engine.poll()
    began = bench.clock()
    for _ in range(count):
        await engine.poll()
    seconds = (bench.clock() - began) / count
    with Operators() as operators:
        await engine.poll()
    found: dict[str, Any] = {"samples": len(lengths), "pass_ms": 1e3 * seconds, "operators": operators.count}
    if bench.on_gpu:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            await engine.poll()
            bench.synchronise()
        events = profiled.events() or []
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
        found |= {"kernels": len(kernels), "gpu_ms": 1e3 * busy, "gpu_busy_share": busy / seconds}
    await engine.interrupt()
    return found
