"""vLLM with n-gram drafts against vLLM without, on the policy of the gcd recipe and on wider copies of it.

Two servers on the same weights, one thread each, take turns: one sample per slot, to their ends. The figure is tokens
per processor second of the server's processes, so that other load matters little; a ratio is of the same round.

    python benchmarks/servers/speculation.py [--sizes 1 7] [--slots 1 8 32]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import aiohttp
import torch
from serving import ROOT, processor_seconds, save, spread, start

from april.config.reading import load_recipe
from april.engines.servers.launch import Server
from april.engines.servers.server import ServerEngine
from april.engines.servers.vllm import connect_vllm
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.policy import load_policy, stop_tokens

DRAFT_TOKENS = 4
N_GRAMS = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def widened(model: torch.nn.Module, times: int) -> torch.nn.Module:
    """The model with its hidden size repeated: every unit is there `times` times, and reads the mean of its copies."""
    if times == 1:
        return model
    kind: Any = type(model)
    config = type(model.config)(**model.config.to_dict())
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, times * getattr(config, name))
    config.tie_word_embeddings = False
    wide = kind(config).eval()
    source = dict(model.state_dict())
    with torch.no_grad():
        for name, into in wide.state_dict().items():
            weight = source[name].float()
            repeats = [into.shape[i] // weight.shape[i] for i in range(weight.dim())]
            reads_hidden = weight.dim() == 2 and not name.endswith("embed_tokens.weight")
            into.copy_(weight.repeat(*repeats) / (times if reads_hidden else 1))
    return wide.requires_grad_(False)


async def counted(server: Server, name: str) -> float:
    async with aiohttp.ClientSession(server.url) as http, http.get("/metrics") as response:
        found = re.search(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


class Arm:
    """A server, and its samples of one turn after the other."""

    def __init__(self, server: Server, engine: ServerEngine, sampling: SamplingParams) -> None:
        self.server, self.engine, self.sampling = server, engine, sampling

    async def turn(self, slots: int, first: int, prompts: Sequence[Prompt]) -> float:
        """Tokens for a second of the server's processes, with `slots` samples at a time."""
        began, tokens = processor_seconds(self.server), 0
        for begin in range(0, len(prompts), slots):
            tokens += await self._together(first + begin, prompts[begin : begin + slots])
        return tokens / (processor_seconds(self.server) - began)

    async def _together(self, first: int, prompts: Sequence[Prompt]) -> int:
        """Tokens of a sample of each prompt, all in flight together."""
        samples = {}
        for number, prompt in enumerate(prompts, first):
            (sample,) = Group.start(number, prompt, 1, self.sampling, 0).samples
            samples[sample.id] = sample
            self.engine.submit(sample)
        while any(sample.finish is None for sample in samples.values()):
            for chunk in await self.engine.poll():
                assert chunk.error is None, chunk.error
                samples[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        return sum(sample.length for sample in samples.values())


async def cell(arms: Sequence[Arm], slots: int, rounds: int, prompts: Any, numbers: Any) -> dict[str, Any]:
    without, drafts = arms
    before = [await counted(drafts.server, name) for name in ("draft_tokens", "accepted_tokens")]
    found: list[tuple[float, float]] = []
    for turn in range(rounds):
        asked = list(itertools.islice(prompts, max(slots, 4)))
        first = 1000 * next(numbers)
        order = (without, drafts) if turn % 2 else (drafts, without)
        speeds = {arm: await arm.turn(slots, first, asked) for arm in order}
        found.append((speeds[without], speeds[drafts]))
    after = [await counted(drafts.server, name) for name in ("draft_tokens", "accepted_tokens")]
    drafted, accepted = (now - then for now, then in zip(after, before, strict=True))
    ratios = [with_drafts / alone for alone, with_drafts in found]
    print(f"{slots:3} slots: x {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    return {
        "slots": slots,
        "ratio": spread(ratios),
        "tokens_per_processor_second_without": spread([alone for alone, _ in found]),
        "tokens_per_processor_second_with": spread([with_drafts for _, with_drafts in found]),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
    }


async def measure(args: argparse.Namespace) -> None:
    recipe = load_recipe(ROOT / "examples" / "gcd" / "recipe.toml")
    model, tokenizer = load_policy(recipe.model)
    prompts = iter(PromptStream(build_task(recipe.task), Encoder(tokenizer), seed=1))
    numbers = itertools.count(1)
    limit = ["--max-model-len", str(recipe.engine.context_length)]
    speculation = ["--speculative-config", json.dumps({**N_GRAMS, "num_speculative_tokens": DRAFT_TOKENS})]
    cells = []
    for times in args.sizes:
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            wide = widened(model, times)
            wide.save_pretrained(directory / "model")
            arms = []
            for name, more in (("without", limit), ("drafts", [*limit, *speculation])):
                starting = start("vllm", directory / "model", directory / name, max(args.slots), more)
                server = await stack.enter_async_context(starting)
                engine = await connect_vllm(server.url, stream_interval=16)
                stack.push_async_callback(engine.close)
                arms.append(Arm(server, engine, recipe.sampling(stop_tokens(model, tokenizer))))
                warming = list(itertools.islice(prompts, max(args.slots)))
                await arms[-1].turn(len(warming), 0, warming)
            parameters = sum(weight.numel() for weight in wide.parameters())
            print(f"{parameters / 1e6:.0f}M parameters", flush=True)
            for slots in args.slots:
                cells.append({"parameters": parameters, **await cell(arms, slots, args.rounds, prompts, numbers)})
            print(save(__file__, "vllm", {"draft_tokens": DRAFT_TOKENS, **N_GRAMS, "cells": cells}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 7], help="times that the policy is widened")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
