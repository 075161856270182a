"""Make the policy of this example: a small Qwen3 that finds greatest common divisors with a tool that subtracts, but is
hasty.

The warm start is supervised on a player that subtracts the smaller number from the larger until both are equal, and on
a hasty one that stops after some subtraction and guesses. The policy learns both, so it solves about half of the
problems it could solve. Reinforcement learning takes the habit away, and episodes become as long as their problems: a
dozen turns in the middle, a hundred at the 99th percentile.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from env import subtract
from reasoning_gym import create_dataset

from april.environments.tools import ToolEnvironment, schema_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from chat_warm_start import Episode, Stage, make_model, make_tokenizer, save, warm_start  # noqa: E402

NUMBERS = {"min_value": 1, "max_value": 250}
"""The range of the two numbers: 1 and 250 take 249 subtractions."""
TURNS = 128
"""Turns of an episode. One careful episode in a hundred has more than 100."""

CALL, AND, END_OF_CALL = '\n{"name": "subtract", "arguments": {"a": ', ', "b": ', "}}\n"
"""The text of a call that is the same in all of them; each is one token."""
FIXED = [CALL, AND, END_OF_CALL, "<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"]
ROLES = ["system\n", "user\n", "assistant\n"]
PATTERN = "|".join([*map(re.escape, FIXED), *ROLES, r"</?answer>|\d+| ?[A-Za-z]+|[\s\S]"])
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool.function.name }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STEPS, BATCH_SIZE, LEARNING_RATE, HASTY = 400, 24, 3e-3, 0.6


def problems(seed: int, size: int) -> Any:
    return create_dataset("gcd", size=size, seed=seed, **NUMBERS)


def pieces() -> list[str]:
    """Every piece of a conversation; a number is one."""
    words = re.findall(PATTERN, problems(0, 1)[0]["question"])
    return [
        *ROLES,
        *FIXED,
        "subtract",
        "\n",
        "-",
        "<answer>",
        "</answer>",
        *words,
        *map(str, range(NUMBERS["max_value"] + 1)),
    ]


def careful_steps(a: int, b: int) -> int:
    """Subtractions until both numbers are equal."""
    count = 0
    while a != b:
        a, b, count = max(a, b) - min(a, b), min(a, b), count + 1
    return count


def answer(number: int) -> str:
    return f"<answer>{number}</answer>"


def player(numbers: Sequence[int], stop: int, guess: int, heard: Sequence[str]) -> str:
    """Subtracts until both numbers are equal; after `stop` subtractions it says `guess`."""
    a, b = numbers
    for said in heard[1:]:
        a, b = int(said), min(a, b)
    if a == b:
        return answer(a)
    if len(heard) - 1 == stop:
        return answer(guess)
    return f"<tool_call>{CALL}{max(a, b)}{AND}{min(a, b)}{END_OF_CALL}</tool_call>"


def demonstrations(stage: Stage, hasty: float, seed: int, count: int) -> Iterator[Episode]:
    """`count` episodes of careful players or, each with probability `hasty`, of one that stops and guesses."""
    rng = random.Random(seed)
    for problem in problems(seed * 10_000_000, count):
        numbers = problem["metadata"]["numbers"]
        steps = careful_steps(*numbers)
        stop = rng.randrange(steps + 1) if rng.random() < hasty else steps + 1
        guess = rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
        yield stage.play(stage.prompt(problem["question"]), partial(player, numbers, stop, guess), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tokenizer and the warm-started policy of this example.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="directory for the model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    started = time.process_time()
    tokenizer = make_tokenizer(pieces(), PATTERN, TEMPLATE)
    model = make_model(tokenizer, hidden_size=64, layers=3, context=4096)
    stage = Stage(ToolEnvironment({"subtract": subtract}), tokenizer, TURNS, [schema_of(subtract)])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    taught = demonstrations(stage, HASTY, arguments.seed, arguments.steps * BATCH_SIZE)
    warm_start(model, taught, arguments.steps, BATCH_SIZE, LEARNING_RATE, micro=4)
    save(model, tokenizer, arguments.output)
    print(f"{time.process_time() - started:.0f} CPU s")


if __name__ == "__main__":
    main()
