"""The embedded engine against `model.generate` and against transformers' own continuous batching, on a CPU.

The same requests for every arm: prompts of 16 to 64 tokens, response budgets drawn from a lognormal distribution and
used up exactly (no stop token), sampling at temperature 1. Useful tokens are the budgets' tokens.

- `embedded`: april's engine, with a log-probability for every token;
- `generate`: static left-padded batches of one request per slot, in order of arrival (lengths are unknown beforehand),
  a batch running until its longest response ends; no log-probabilities;
- `continuous`: transformers' continuous batching, on the fastest of the settings tried by hand (`--tune` tries a grid);
  no log-probabilities.

The workload `group` requests eight responses to each long prompt, and has a fourth arm, `unshared`: the embedded engine
with prompts of the same lengths that all differ.

    python benchmarks/embedded_engine.py            # 2 threads, under ten minutes
    python benchmarks/embedded_engine.py --quick    # a few requests, nothing saved
    python benchmarks/embedded_engine.py --tune     # settings of transformers' continuous batching, nothing saved
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from record import save, spread
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from april import Sample, SamplingParams
from april.engines.embedded import EmbeddedEngine


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    budget: int


@dataclass(frozen=True)
class Workload:
    """Requests, and the slots that every arm may use. `share` is how many requests have the same prompt."""

    name: str
    model: dict[str, int]
    requests: int
    slots: int
    median: int
    longest: int
    prompt: tuple[int, int] = (16, 64)
    sigma: float = 1.0
    share: int = 1
    page_size: int = 256
    batch_tokens: int = 512


SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
MEDIUM = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
MEDIUM |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}

WORKLOADS = [
    Workload("5M", SMALL, requests=96, slots=32, median=64, longest=512),
    Workload("50M", MEDIUM, requests=48, slots=16, median=40, longest=320, page_size=32),
    Workload("group", SMALL, requests=96, slots=32, median=32, longest=64, prompt=(256, 256), sigma=0.3, share=8),
]


def requests_of(work: Workload, distinct: bool = False) -> list[Request]:
    rng = random.Random(1)
    made = []
    for i in range(work.requests):
        if distinct or i % work.share == 0:
            length = rng.randint(*work.prompt)
            prompt = tuple(rng.randrange(work.model["vocab_size"]) for _ in range(length))
        made.append(Request(prompt, 0))
    budgets = random.Random(2)
    draw = lambda: int(work.median * budgets.lognormvariate(0, work.sigma))  # noqa: E731
    return [replace(request, budget=min(max(draw(), 4), work.longest)) for request in made]


def build(work: Workload) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(**work.model, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0)
    return Qwen3ForCausalLM(config).eval()


Arm = Callable[[], int]


def embedded(model: PreTrainedModel, work: Workload, requests: list[Request]) -> Arm:
    engine = EmbeddedEngine(model, max_num_seqs=work.slots, kv_cache_bytes=1 << 31, stop_token_ids=())
    seeds = itertools.count()

    async def serve() -> int:
        for i, request in enumerate(requests):
            params = SamplingParams(max_tokens=request.budget)
            engine.submit(Sample(i // work.share, i % work.share, request.prompt, params, next(seeds)))
        tokens = 0
        while chunks := await engine.poll():
            tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return tokens

    return lambda: asyncio.run(serve())


def static_generate(model: PreTrainedModel, work: Workload, requests: list[Request]) -> Arm:
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def serve() -> int:
        tokens = 0
        for start in range(0, len(requests), work.slots):
            batch = requests[start : start + work.slots]
            width = max(len(request.prompt) for request in batch)
            ids = torch.tensor([[0] * (width - len(r.prompt)) + list(r.prompt) for r in batch])
            mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
            longest = max(request.budget for request in batch)
            limits = {"min_new_tokens": None, "max_new_tokens": longest}
            out = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, **limits)
            assert out.shape[1] == width + longest
            tokens += sum(request.budget for request in batch)
        return tokens

    return serve


def continuous(
    model: PreTrainedModel, work: Workload, requests: list[Request], attention: str = "sdpa", **options: Any
) -> Arm:
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    generation = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    slots = options.pop("max_requests_per_batch", work.slots)
    page = options.get("page_size", work.page_size)
    longest = max(len(request.prompt) for request in requests) + max(request.budget for request in requests)
    settings = {
        "page_size": page,
        "num_blocks": slots * (-(-longest // page) + 1) + 8,
        "max_batch_tokens": work.batch_tokens,
        "max_requests_per_batch": slots,
        "allow_block_sharing": work.share > 1,
        "auto_switch_to_flash": False,
        "use_cuda_graph": False,
        "max_queue_size": 0,
    }

    def serve() -> int:
        config = ContinuousBatchingConfig(**settings | options)
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False, persistent_manager=True
        ) as manager:
            for i, request in enumerate(requests):
                manager.add_request(list(request.prompt), request_id=str(i), max_new_tokens=request.budget)
            tokens = finished = 0
            while finished < len(requests):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("transformers' continuous batching has stopped")
                if result.is_finished():
                    assert result.error is None, result.error
                    finished += 1
                    tokens += len(result.generated_tokens)
        return tokens

    return serve


def seconds(arm: Arm, expected: int) -> float:
    start = time.perf_counter()
    tokens = arm()
    elapsed = time.perf_counter() - start
    assert tokens == expected, f"{tokens} tokens came of {expected}"
    return elapsed


def arms_of(model: PreTrainedModel, work: Workload, requests: list[Request]) -> dict[str, Arm]:
    arms = {
        "embedded": embedded(model, work, requests),
        "generate": static_generate(model, work, requests),
        "continuous": continuous(model, work, requests),
    }
    if work.share > 1:
        distinct = requests_of(work, distinct=True)[: len(requests)]
        arms["unshared"] = embedded(model, replace(work, share=1), distinct)
    return arms


def compare(work: Workload, rounds: int) -> dict[str, Any]:
    """Every arm on a few requests to warm up, then on all of them `rounds` times in turn."""
    model, requests = build(work), requests_of(work)
    useful = sum(request.budget for request in requests)
    for arm in arms_of(model, work, requests[:4]).values():
        arm()
    arms = arms_of(model, work, requests)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            times[name].append(seconds(arm, useful))
    ratios = {
        f"embedded / {name}": spread([b / a for a, b in zip(times["embedded"], times[name], strict=True)])
        for name in arms
        if name != "embedded"
    }
    for name, figures in ratios.items():
        print(f"{work.name:6} {name:24} {figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "requests": len(requests),
        "slots": work.slots,
        "useful_tokens": useful,
        "longest_budget": max(request.budget for request in requests),
        "useful_tokens_per_second": {name: spread([useful / t for t in found]) for name, found in times.items()},
        "ratios": ratios,
        "seconds": times,
    }


def tune(work: Workload) -> None:
    """Settings of transformers' continuous batching, each twice, the better of the two."""
    model, requests = build(work), requests_of(work)
    useful = sum(request.budget for request in requests)
    grid = itertools.product(
        ["sdpa", "paged|eager"], [16, 64, 256], [work.slots, work.slots // 2, work.slots // 4], [256, 1024]
    )
    for attention, page, slots, batch in grid:
        options = {"page_size": page, "max_requests_per_batch": slots, "max_batch_tokens": batch}
        best = min(seconds(continuous(model, work, requests, attention, **options), useful) for _ in range(2))
        print(f"{work.name:6} {useful / best:7.0f} tokens/s  {attention} {options}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[work.name for work in WORKLOADS], default=[])
    parser.add_argument("--quick", action="store_true", help="a third of the requests, two rounds, nothing saved")
    parser.add_argument("--tune", action="store_true", help="try settings of transformers' continuous batching")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    works = [work for work in WORKLOADS if not args.only or work.name in args.only]
    if args.quick:
        works = [replace(work, requests=work.requests // 3 // 8 * 8, slots=work.slots // 2) for work in works]
    if args.tune:
        for work in works:
            tune(work)
        return
    results = {}
    for work in works:
        results[work.name] = compare(work, 2 if args.quick else args.rounds)
        if not args.quick:
            print("saved", save(__file__, {"torch_threads": args.threads, "workloads": results}), flush=True)


if __name__ == "__main__":
    main()
