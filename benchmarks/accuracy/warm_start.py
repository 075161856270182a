"""Make the policies of the accuracy study: for two more tasks of reasoning-gym, a tokenizer and a small Qwen3.

The method is as in `examples/gcd/make_checkpoint.py`, whose code this uses: supervised training on careful traces and
on hasty ones that stop at some step, so that the policy can do the task and does it about half of the time.

- `primes` (`count_primes`): every number of the interval in turn, with a tally at each prime.
- `factors` (`prime_factorization`): every divisor that is tried, one after the other up to the largest prime factor. A
  prime takes as many steps as it is large.

Each task's own constant text is one token, a number is one token.

Invariants:
- the evaluated weights are the stored ones: they are rounded to bf16 before the evaluation;
- everything random is seeded: weights, problems, demonstrations and evaluation all follow from seeds.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/warm_start.py primes factors
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from reasoning_gym import create_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gcd"))

from make_checkpoint import (  # noqa: E402
    EOS,
    held_out_figures,
    make_model,
    make_tokenizer,
    percentiles,
    save,
    warm_start,
)

HELD_OUT_SEED, HELD_OUT_SIZE = 900_000_000, 128
"""Far from any other seed in use: reasoning-gym draws problem i of seed s from Random(s + i)."""

MAX_TOKENS = 320
"""Response budget. No careful trace is longer."""

BATCH_SIZE, LEARNING_RATE = 32, 2e-3

Problem = dict[str, Any]
Trace = list[tuple[str, str]]
"""Each step as it is written, and the answer of one who stops after it; the last one's is right."""


def primes_trace(problem: Problem) -> Trace:
    """The numbers from the first to the last, the primes with their tally; who stops gives the tally so far.

    >>> primes_trace({"metadata": {"start": 10, "end": 12, "primes": [11]}})
    [(' 10', '0'), (' 11=1', '1'), (' 12', '1')]
    """
    start, end, primes = (problem["metadata"][name] for name in ("start", "end", "primes"))
    trace = []
    for number in range(start, end + 1):
        tally = sum(prime <= number for prime in primes)
        trace.append((f" {number}={tally}" if number in primes else f" {number}", str(tally)))
    return trace


def factors_trace(problem: Problem) -> Trace:
    """Trial division by every number in turn; who stops takes the last number tried for the last factor.

    >>> factors_trace({"metadata": {"number": 6}})
    [(' 2* 3', ' 2'), (' 2', ' 2 × 2'), (' 3* 1', ' 2 × 3')]
    """
    left, divisor = problem["metadata"]["number"], 2
    found: list[int] = []
    trace = []
    while left > 1:
        if left % divisor:
            trace.append((f" {divisor}", " ×".join(f" {factor}" for factor in [*found, divisor])))
            divisor += 1
        else:
            left //= divisor
            found.append(divisor)
            trace.append((f" {divisor}* {left}", " ×".join(f" {factor}" for factor in found)))
    return trace


@dataclass(frozen=True)
class Lesson:
    """A task and how it is taught.

    Args:
        dataset: its name in reasoning-gym.
        trace: the careful trace of a problem.
        pattern: what becomes one token.
        hasty: share of demonstrations that stop at a uniformly drawn step.
        steps: optimizer steps of the warm start.
        hold_out: whether the warm start leaves the held-out questions out. Which numbers are prime has to be known.
    """

    dataset: str
    trace: Callable[[Problem], Trace]
    pattern: str
    hasty: float
    steps: int
    hold_out: bool
    params: dict[str, Any] = field(default_factory=dict)


LESSONS = {
    "primes": Lesson(
        dataset="count_primes",
        trace=primes_trace,
        pattern=r"Count how[\s\S]* between| and| \(inclusive\) \?|</?answer>|=\d+| ?\d+|[\s\S]",
        hasty=0.6,
        steps=700,
        hold_out=True,
        params={"min_n": 1, "max_n": 200},
    ),
    "factors": Lesson(
        dataset="prime_factorization",
        trace=factors_trace,
        pattern=r"Find the prime factorization of|\. Write the factors[\s\S]*|</?answer>| ?\d+| ×|[\s\S]",
        hasty=0.5,
        steps=900,
        hold_out=False,
        params={"min_value": 2, "max_value": 300},
    ),
}


def response(trace: Trace, steps: int) -> str:
    """The first `steps` of a trace and the answer that follows them."""
    return "".join(text for text, _ in trace[:steps]) + f"<answer>{trace[steps - 1][1]}</answer>{EOS}"


def problems(lesson: Lesson, seed: int, size: int) -> Iterator[Problem]:
    dataset = create_dataset(lesson.dataset, size=size, seed=seed, **lesson.params)
    held_out = {problem["question"] for problem in held_out_problems(lesson)} if lesson.hold_out else set()
    return (problem for problem in dataset if problem["question"] not in held_out)


def held_out_problems(lesson: Lesson) -> Any:
    """The problems that the accuracy of the warm start is measured on."""
    return create_dataset(lesson.dataset, size=HELD_OUT_SIZE, seed=HELD_OUT_SEED, **lesson.params)


def demonstrations(lesson: Lesson, tokenizer: Any, seed: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and response ids of `count` demonstrations."""
    rng = random.Random(seed)
    for _, problem in zip(range(count), problems(lesson, seed * 10_000_000, 2 * count), strict=False):
        trace = lesson.trace(problem)
        steps = rng.randint(1, len(trace)) if rng.random() < lesson.hasty else len(trace)
        yield tokenizer.encode(problem["question"]), tokenizer.encode(response(trace, steps))


def vocabulary_of(lesson: Lesson, size: int = 5000) -> list[str]:
    """Every piece of `size` problems and their careful responses."""
    texts = (text for problem, t in traced(lesson, 0, size) for text in (problem["question"], response(t, len(t))))
    return sorted({piece for text in texts for piece in re.findall(lesson.pattern, text.removesuffix(EOS))})


def traced(lesson: Lesson, seed: int, size: int) -> Iterator[tuple[Problem, Trace]]:
    return ((problem, lesson.trace(problem)) for problem in problems(lesson, seed, size))


def make(name: str, output: Path, seed: int) -> float:
    """Teach a policy the task `name`, save it in `output`, and return the CPU seconds it took."""
    lesson = LESSONS[name]
    started = time.process_time()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(vocabulary_of(lesson), lesson.pattern)
    model = make_model(tokenizer, hidden_size=96, layers=3)
    taught = demonstrations(lesson, tokenizer, seed, lesson.steps * BATCH_SIZE)
    warm_start(model, taught, lesson.steps, BATCH_SIZE, LEARNING_RATE)
    save(model, tokenizer, output, MAX_TOKENS)
    return time.process_time() - started


def measure(name: str, output: Path) -> dict[str, Any]:
    """The accuracy and the lengths of the policy in `output`, and what careful responses are long."""
    lesson = LESSONS[name]
    model: Any = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output)
    measured = held_out_figures(model, tokenizer, held_out_problems(lesson), MAX_TOKENS, n=4, seed=1)
    careful = [len(tokenizer.encode(response(t, len(t)))) for _, t in traced(lesson, HELD_OUT_SEED, 2000)]
    print(f"{name}: held-out accuracy {measured['exactly_right']:.3f} with the weights in {output}", flush=True)
    return {
        "dataset": {"name": lesson.dataset, **lesson.params, "max_tokens": MAX_TOKENS},
        "careful_tokens": percentiles(careful),
        "held_out": {"seed": HELD_OUT_SEED, "size": HELD_OUT_SIZE, **measured},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=LESSONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="only measure the policies that are there")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = HERE / "warm_start.json"
    for name in chosen.tasks:
        lesson, output = LESSONS[name], HERE / "models" / name
        figures = json.loads(path.read_text()) if path.exists() else {}
        settings = {"seed": chosen.seed, "steps": lesson.steps, "batch_size": BATCH_SIZE, "hasty": lesson.hasty}
        made = {} if chosen.measure else {"settings": settings, "cpu_seconds": make(name, output, chosen.seed)}
        figures[name] = figures.get(name, {}) | made | measure(name, output)
        path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
