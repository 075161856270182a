"""Drafts against none in the embedded engine, at three sizes of one policy and at 1 to 128 decode slots.

The policy of the quickstart (1M parameters), and the same policy made wider: its hidden size, heads and feed-forward
layers are repeated 7 and 17 times, with the weights divided by as much. A wider model computes the same logits to
rounding, so that 50M and 300M parameters write the texts that were learned, at their own cost. Four layers each.

Synchronous steps hold as many samples as there are slots (at least one group of 8, which one slot serves in turn);
partial ones have twice as many groups under way. With and without drafts take turns, a step each, one thread; a ratio
is the tokens sampled per processor second with drafts over those without, of the same round.

The tail of a synchronous step is what is left of it when so few samples are unfinished that they take a quarter of the
slots; its ratio is that of tokens per processor second, as for the whole step. (With drafts more of the tokens may be
left for it: long responses are often those that are drafted badly, and lag behind.)

What is measured is saved as it comes, in the place of what the file has of the same cells.

    OMP_NUM_THREADS=1 python benchmarks/drafts.py                        # more than an hour of one core
    OMP_NUM_THREADS=1 python benchmarks/drafts.py --sizes 1 --slots 8    # some of it
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from record import save, spread

from april import RolloutScheduler
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.sequence import Sequence
from april.rollout.params import RolloutParams
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.policy import load_policy, stop_tokens

SIZES = (1, 7, 17)
SLOTS = (1, 8, 32, 128)
GROUP = 8
DRAFT_TOKENS = 8


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


class Arm:
    """A scheduler on an engine of its own; `block` is one step, in processor seconds."""

    def __init__(self, recipe: Recipe, policy: Any, task: Any, slots: int, partial: bool, draft_tokens: int) -> None:
        model, tokenizer = policy
        groups = max(1, slots // GROUP)
        self.engine = EmbeddedEngine(
            model,
            max_num_seqs=slots,
            context_length=recipe.engine.context_length,
            on_update="keep",
            stream_interval=32,
            draft_tokens=draft_tokens,
        )
        self.scheduler = RolloutScheduler(
            self.engine,
            iter(PromptStream(task, Encoder(tokenizer), seed=1)),
            self._reward,
            RolloutParams(
                rollout_batch_size=groups,
                over_sampling_batch_size=groups * (2 if partial else 1),
                n_samples_per_prompt=GROUP,
                partial_rollout=partial,
            ),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
        )
        self.drafted = self.accepted = self.passes = 0
        self.tail_seconds, self.tail_tokens, self._few = 0.0, 0, slots // 4
        self._count_tail()
        drafter: Any = self.engine._drafter
        learn = drafter.learn

        def counted(drawn: dict[Sequence, int], *seen: Any) -> None:
            self.passes += 1
            self.drafted += sum(len(sequence.draft) for sequence in drawn)
            self.accepted += sum(count - 1 for count in drawn.values())
            learn(drawn, *seen)

        drafter.learn = counted

    def _count_tail(self) -> None:
        """Add up the processor seconds and the tokens of the engine's steps in which few samples are unfinished."""
        engine: Any = self.engine
        step = engine._step

        def timed() -> bool:
            left = list(engine._sequences.in_flight.values())
            if len(left) > self._few:
                return bool(step())
            before, began = sum(len(sequence.tokens) for sequence in left), time.process_time()
            more: bool = step()
            self.tail_seconds += time.process_time() - began
            self.tail_tokens += sum(len(sequence.tokens) for sequence in left) - before
            return more

        engine._step = timed

    @staticmethod
    async def _reward(prompt: Any, sample: Any) -> float:
        return 0.0

    @property
    def tail_rate(self) -> float:
        """Tokens per processor second in the tail of the last step."""
        return self.tail_tokens / self.tail_seconds

    async def block(self) -> float:
        """Tokens sampled per processor second of one step, and of those before it that found their groups complete."""
        seconds, tokens, self.tail_seconds, self.tail_tokens = 0.0, 0, 0.0, 0
        while not tokens:
            began = time.process_time()
            step = await self.scheduler.collect()
            seconds += time.process_time() - began
            tokens = step.sampled_tokens
            await self.scheduler.update_weights()
        return tokens / seconds


async def cell(args: argparse.Namespace, recipe: Recipe, policy: Any, task: Any, slots: int, partial: bool) -> dict:
    without, drafts = (Arm(recipe, policy, task, slots, partial, count) for count in (0, DRAFT_TOKENS))
    for arm in (without, drafts):
        await arm.block()
    drafts.drafted = drafts.accepted = drafts.passes = without.passes = 0
    rounds: list[tuple[float, float]] = []
    tails: list[float] = []
    began = time.process_time()
    for turn in itertools.count():
        arms = (without, drafts) if turn % 2 else (drafts, without)
        found = {id(arm): await arm.block() for arm in arms}
        rounds.append((found[id(without)], found[id(drafts)]))
        if not partial and drafts.tail_tokens and without.tail_tokens:
            tails.append(drafts.tail_rate / without.tail_rate)
        if len(rounds) >= args.least and time.process_time() - began > args.seconds:
            break
    parameters = sum(weight.numel() for weight in policy[0].parameters())
    ratios = [after / before for before, after in rounds]
    print(
        f"{parameters / 1e6:5.0f}M  {slots:4} slots  {'partial' if partial else 'synchronous':11}  "
        f"x {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds), "
        f"{drafts.accepted / max(1, drafts.drafted):.2f} of {drafts.drafted} drafted tokens drawn"
        + (f"; its tail x {statistics.median(tails):.2f}" if tails else ""),
        flush=True,
    )
    return {
        "parameters": parameters,
        "slots": slots,
        "partial": partial,
        "ratio": spread(ratios),
        **({"tail_ratio": spread(tails)} if tails else {}),
        "tokens_per_second_without": spread([before for before, _ in rounds]),
        "tokens_per_second_with": spread([after for _, after in rounds]),
        "passes_of_without": drafts.passes / max(1, without.passes),
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
        **costs_of(drafts.engine, slots),
    }


def costs_of(engine: EmbeddedEngine, slots: int) -> dict[str, float]:
    """What the engine has learned that a full batch's pass takes, and a drafted token in it."""
    costs = engine._drafter._costs
    return {"pass_seconds": costs.plain(slots), "drafted_token_seconds": costs.token(slots)}


async def measure(args: argparse.Namespace) -> None:
    recipe = load_recipe(Path(args.recipe))
    model, tokenizer = load_policy(recipe.model)
    task = build_task(recipe.task)
    path = Path(__file__).with_suffix(".json")
    held = json.loads(path.read_text())["cells"] if path.exists() else []
    cells: dict[tuple[Any, ...], Any] = {name_of(found): found for found in held}
    for times in args.sizes:
        wide = widened(model, times)
        check = torch.tensor([[5, 9, 7, 3]])
        with torch.no_grad():
            apart = (wide(check).logits - model(check).logits.float()).abs().max().item()
        assert apart < 0.05, f"the wider model computes other logits, by {apart}"
        for slots, partial in itertools.product(args.slots, (False, True)):
            found = await cell(args, recipe, (wide, tokenizer), task, slots, partial)
            cells[name_of(found)] = found
            save(__file__, {"draft_tokens": DRAFT_TOKENS, "cells": [cells[name] for name in sorted(cells)]})


def name_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[key] for key in ("parameters", "slots", "partial"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="examples/gcd/recipe.toml")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="times that the policy is widened")
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="processor seconds a cell, at least")
    parser.add_argument("--least", type=int, default=3, help="rounds a cell, at least")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
