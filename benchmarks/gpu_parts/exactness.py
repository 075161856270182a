"""Samples interrupted at random and resumed, against the same samples undisturbed.

The share of equal responses, where the others differ first, and how far recorded log-probabilities are from a plain
forward pass.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_parts.bench import Bench, generate, prompts
from parts import Figures
from record import spread
from transformers import PreTrainedModel

from april.engines.embedded import EmbeddedEngine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample

FLOAT32_ERROR, BFLOAT16_ERROR = 1e-3, 0.3
"""Nats by which a recorded log-probability may differ from a plain forward pass. The value of bfloat16 is assumed."""


def measure(bench: Bench) -> Figures:
    model = bench.model(bench.shape)
    settings = {"max_num_seqs": 16, "context_length": 1024}
    undisturbed = samples(bench)
    asyncio.run(generate(EmbeddedEngine(model, **settings), undisturbed))
    errors = {"undisturbed": logprob_error(model, undisturbed)}
    yield "samples", len(undisturbed)
    yield "logprob_error", errors["undisturbed"]
    for name in ("resumed", "recomputed"):
        again = samples(bench)
        engine = EmbeddedEngine(model, **settings)
        if name == "recomputed":
            engine.interrupt = forgetting(engine)  # type: ignore[method-assign]
        asyncio.run(generate(engine, again, random.Random(1)))
        pairs = list(zip(undisturbed, again, strict=True))
        first = [
            next(i for i, (a, b) in enumerate(zip(one.response_ids, other.response_ids, strict=True)) if a != b)
            for one, other in pairs
            if one.response_ids != other.response_ids
        ]
        errors[name] = logprob_error(model, again)
        yield (
            name,
            {
                "equal_responses": statistics.fmean(one.response_ids == other.response_ids for one, other in pairs),
                "first_difference_at_token": spread(first) if first else None,
                "logprob_error": errors[name],
            },
        )
    most = FLOAT32_ERROR if bench.dtype == torch.float32 else BFLOAT16_ERROR
    yield "failures", [f"log-probabilities, {name}: {e:.2g} nats apart" for name, e in errors.items() if not e <= most]


def samples(bench: Bench) -> list[Sample]:
    """Groups of four, each sample with a budget of its own that ends it."""
    made, tokens = [], bench.size(192, 16)
    for i, prompt in enumerate(prompts(bench.size(8, 2), 32, bench.shape.vocabulary)):
        for j, sample in enumerate(Group.start(i, prompt, 4, SamplingParams(), 0).samples):
            made.append(replace(sample, sampling=SamplingParams(max_tokens=tokens // 2 + (tokens * j) // 8)))
    return made


@torch.inference_mode()
def logprob_error(model: PreTrainedModel, given: Sequence[Sample]) -> float:
    """The largest difference, in nats, between a recorded log-probability and a plain forward pass."""
    worst = 0.0
    for sample in given:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        plain = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0].cpu()
        worst = max(worst, float((plain - torch.from_numpy(sample.logprobs)).abs().max()))
    return worst


def forgetting(engine: EmbeddedEngine) -> Callable[..., Any]:
    """An interrupt that drops every KV cache, as an update of the weights does."""
    interrupt = engine.interrupt

    async def interrupted() -> Any:
        chunks = await interrupt()
        engine.forget()
        return chunks

    return interrupted
