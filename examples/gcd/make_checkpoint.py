"""Make the quickstart's policy: a tokenizer and a small Qwen3 that can find greatest common divisors, but is hasty.

The warm start is supervised on two kinds of traces of the subtractive Euclid algorithm. Careful ones are written to the
end; hasty ones stop after some step and guess. The policy learns both the arithmetic and the bad habit, so it solves
about half of the problems it could solve. Reinforcement learning takes the habit away.

Invariants:
- no pair of numbers of the held-out problems occurs in the warm start, in either order;
- the evaluated weights are the stored ones: they are rounded to bf16 before the evaluation;
- everything random is seeded: weights, problems, demonstrations and evaluation all follow from seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from april.engines.embedded import EmbeddedEngine
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

NUMBERS = {"min_value": 1, "max_value": 150}
"""The range of the two numbers. Wide enough for a long tail of lengths: 1 and 150 take 149 subtractions."""

MAX_TOKENS = 512
"""Response budget. Less than one careful trace in a hundred is longer."""

HELD_OUT_SEED, HELD_OUT_SIZE = 900_000_000, 128
"""Far from any other seed in use: reasoning-gym draws problem i of seed s from Random(s + i)."""

PIECE = r"</?answer>| ?[A-Za-z]+|[\s\S]"
"""What becomes one token: an answer tag, a word with the space before it, or any other single character."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

STEPS, BATCH_SIZE, LEARNING_RATE, HASTY = 1200, 32, 2e-3, 0.6

Problem = dict[str, Any]


def held_out_problems() -> Any:
    """The `gcd` dataset of reasoning-gym that the accuracy is measured on."""
    return create_dataset("gcd", size=HELD_OUT_SIZE, seed=HELD_OUT_SEED, **NUMBERS)


def careful_trace(a: int, b: int) -> list[str]:
    """Every state of the subtractive Euclid algorithm, the first being the problem itself.

    >>> careful_trace(6, 4)
    ['6,4', '2,4', '2,2']
    """
    states = [f"{a},{b}"]
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        states.append(f"{a},{b}")
    return states


def response(states: Sequence[str], answer: int) -> str:
    return f"{'>'.join(states)}<answer>{answer}</answer>{EOS}"


def demonstration(problem: Problem, hasty: float, rng: random.Random) -> str:
    """A careful response or, with probability `hasty`, one that stops at a uniformly drawn step and guesses."""
    a, b = problem["metadata"]["numbers"]
    states = careful_trace(a, b)
    if rng.random() >= hasty:
        return response(states, math.gcd(a, b))
    stop = rng.randint(1, len(states))
    return response(states[:stop], rng.choice((1, 1, 2, 3, rng.randint(1, 20))))


def vocabulary_of(problem: Problem) -> list[str]:
    """The digits, the characters of a trace, the answer tags and the words of the question."""
    return [*"0123456789", *",> ", "<answer>", "</answer>", *re.findall(PIECE, problem["question"])]


def make_tokenizer(pieces: Sequence[str], pattern: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the known `pieces`, which the regular expression `pattern` cuts a text into.

    Decoding gives back the exact text, spaces included. There is no chat template and no start token: the response
    follows the question directly.
    """
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys([PAD, EOS, UNK, *pieces]))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, layers: int = 4) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, hasty: float, seed: int, count: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and response ids of `count` demonstrations, each of a fresh problem that is not held out."""
    rng = random.Random(seed)
    forbidden = {frozenset(problem["metadata"]["numbers"]) for problem in held_out_problems()}
    problems = create_dataset("gcd", size=2 * count, seed=seed * 10_000_000, **NUMBERS)
    allowed = (p for p in problems if frozenset(p["metadata"]["numbers"]) not in forbidden)
    for _, problem in zip(range(count), allowed, strict=False):
        text = demonstration(problem, hasty, rng)
        yield tokenizer.encode(problem["question"]), tokenizer.encode(text)[:MAX_TOKENS]


def negative_log_likelihood(model: Qwen3ForCausalLM, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Summed over the response tokens of `batch`, in nats."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full((len(batch), length), -100)
    for row, (prompt, answer) in enumerate(batch):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def warm_start(
    model: Qwen3ForCausalLM,
    demonstrations: Iterator[tuple[list[int], list[int]]],
    steps: int,
    batch_size: int,
    peak_lr: float,
) -> None:
    """Supervised training on `demonstrations`; the learning rate rises over 50 steps and falls on a cosine to 2 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    started, seen, loss_sum = time.monotonic(), 0, 0.0
    for step in range(1, steps + 1):
        batch = sorted(itertools.islice(demonstrations, batch_size), key=lambda pair: len(pair[1]))
        tokens = sum(len(answer) for _, answer in batch)
        # Lengths vary: padding wastes a sixth of the work with four at a time, and half of it with sixteen.
        for micro_batch in (batch[i : i + 4] for i in range(0, batch_size, 4)):
            nll = negative_log_likelihood(model, micro_batch)
            (nll / tokens).backward()
            loss_sum += nll.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += tokens
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss_sum / seen:.3f} nats/token  {seconds:.0f} s", flush=True)
            seen, loss_sum = 0, 0.0


async def finish(engine: EmbeddedEngine, samples: Sequence[Sample]) -> None:
    """Generate until every sample has ended or spent its budget."""
    by_id = {sample.id: sample for sample in samples}
    for sample in samples:
        engine.submit(sample)
    while any(sample.finish is None for sample in samples):
        for chunk in await engine.poll():
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    await engine.close()


def sample_responses(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    max_tokens: int,
    n: int,
    seed: int,
) -> list[Group]:
    """`n` responses to each problem at temperature 1."""
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    prompts = (Prompt(tuple(tokenizer.encode(problem["question"]))) for problem in problems)
    groups = [Group.start(id, prompt, n, sampling, seed) for id, prompt in enumerate(prompts)]
    engine = EmbeddedEngine(model, max_num_seqs=256)
    asyncio.run(finish(engine, [sample for group in groups for sample in group.samples]))
    return groups


def percentiles(lengths: Sequence[int]) -> dict[str, int]:
    ordered = sorted(lengths)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[math.ceil(rank * len(ordered)) - 1] for name, rank in ranks.items()}


def held_out_figures(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, dataset: Any, max_tokens: int, n: int, seed: int
) -> dict[str, Any]:
    """Accuracy (the mean of reasoning-gym's scores) and response lengths over `n` samples of each held-out problem.

    A malformed answer, at which some of its scorers raise an error, scores 0.
    """
    scores, lengths, truncated = [], [], 0
    groups = sample_responses(model, tokenizer, list(dataset), max_tokens, n, seed)
    for problem, group in zip(dataset, groups, strict=True):
        for sample in group.samples:
            text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            try:
                scores.append(dataset.score_answer(answer=extract_answer(text), entry=problem))
            except ValueError:
                scores.append(0.0)
            lengths.append(sample.length)
            truncated += sample.finish is FinishReason.LENGTH
    return {
        "accuracy": sum(scores) / len(scores),
        "exactly_right": scores.count(1.0) / len(scores),
        "samples": len(scores),
        "truncated": truncated / len(scores),
        "response_tokens": percentiles(lengths),
    }


def task_figures(size: int = 10_000) -> dict[str, Any]:
    """What `size` problems demand: the lengths of careful traces, and the score of the best answer without thinking."""
    dataset = create_dataset("gcd", size=size, seed=HELD_OUT_SEED + HELD_OUT_SIZE, **NUMBERS)
    answers, lengths = Counter[str](), []
    for problem in dataset:
        a, b = problem["metadata"]["numbers"]
        answers[problem["answer"]] += 1
        lengths.append(len(re.findall(PIECE, response(careful_trace(a, b), math.gcd(a, b)).removesuffix(EOS))) + 1)
    scores = {
        guess: sum(dataset.score_answer(guess, {"answer": answer}) * n for answer, n in answers.items()) / size
        for guess in answers
    }
    best = max(scores, key=scores.__getitem__)
    return {
        "problems": size,
        "careful_tokens": percentiles(lengths),
        "careful_over_budget": sum(length > MAX_TOKENS for length in lengths) / size,
        "best_constant_guess": {"answer": best, "score": scores[best]},
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path, max_tokens: int) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def parse_arguments() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description="Make the quickstart's tokenizer and warm-started policy, and measure it on held-out problems.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=here / "model", help="directory for the model and tokenizer")
    parser.add_argument("--figures", type=Path, default=here / "checkpoint.json", help="file for what was measured")
    parser.add_argument("--seed", type=int, default=0, help="for the weights, the problems and the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="demonstrations per step")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="peak of the schedule")
    parser.add_argument("--hasty", type=float, default=HASTY, help="share of demonstrations that stop early and guess")
    parser.add_argument("--samples", type=int, default=8, help="responses per held-out problem in the evaluation")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(vocabulary_of(held_out_problems()[0]), PIECE)
    model = make_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    count = arguments.steps * arguments.batch_size
    taught = demonstrations(tokenizer, arguments.hasty, arguments.seed, count)
    warm_start(model, taught, arguments.steps, arguments.batch_size, arguments.learning_rate)
    trained = time.monotonic()
    save(model, tokenizer, arguments.output, MAX_TOKENS)

    shipped: Any = AutoModelForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    shipped_tokenizer: Any = AutoTokenizer.from_pretrained(arguments.output)
    measured = held_out_figures(shipped, shipped_tokenizer, held_out_problems(), MAX_TOKENS, arguments.samples, seed=1)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "figures")}
    figures = {
        "settings": settings,
        "dataset": {"name": "gcd", **NUMBERS, "max_tokens": MAX_TOKENS},
        "task": task_figures(),
        "held_out": {"seed": HELD_OUT_SEED, "size": HELD_OUT_SIZE, **measured},
        "parameters": parameters,
        "warm_start_seconds": round(trained - started, 1),
        "total_seconds": round(time.monotonic() - started, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }
    arguments.figures.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"held-out accuracy {measured['accuracy']:.3f} with the weights in {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
