"""Decode steps and prefill as `april simulate` computes them from a data sheet, against measured times."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from gpu_parts.bench import Bench
from parts import Figures

from april.engines.embedded import EmbeddedEngine
from april.simulation.hardware import GPUS, roofline
from april.simulation.sweep import Sweep


def measure(bench: Bench) -> Figures:
    name = torch.cuda.get_device_name().lower().replace(" ", "") if bench.on_gpu else ""
    gpu = next((gpu for key, gpu in GPUS.items() if key in name), None)
    yield "data_sheet", gpu and gpu.name
    for shape in bench.shapes:
        engine = EmbeddedEngine(bench.model(shape), max_num_seqs=bench.size(256, 4), context_length=1024)

        async def update(version: int, engine: EmbeddedEngine = engine) -> None:
            await engine.update_weights(version)

        sweep = Sweep(engine, update, "recompute", np.random.default_rng(0), shape.vocabulary, bench.clock)

        async def swept(sweep: Sweep = sweep) -> tuple[list[Any], list[Any]]:
            await sweep.decode(1, 4, 4)
            batches = (1, 4) if bench.tiny else (1, 16, 64, 256)
            decoding = [await sweep.decode(batch, 128, bench.size(24, 4)) for batch in batches]
            return decoding, [await sweep.prefill((length,)) for length in (128, bench.size(768, 128))]

        decoding, prefill = asyncio.run(swept())
        cost = roofline(gpu, shape) if gpu else None
        yield (
            shape.name,
            {
                "decode_step_seconds": [
                    {
                        "batch": m.batch,
                        "measured": m.seconds,
                        "roofline": cost and float(cost.base(m.batch)[m.batch]) + cost.kv_token_seconds * m.kv_tokens,
                    }
                    for m in decoding
                ],
                "prefill_seconds": [
                    {
                        "tokens": sum(m.lengths),
                        "measured": m.seconds,
                        "roofline": cost
                        and sum(n * cost.prefill_token_seconds + n * n * cost.prefill_pair_seconds for n in m.lengths),
                    }
                    for m in prefill
                ],
            },
        )
        del engine, sweep
