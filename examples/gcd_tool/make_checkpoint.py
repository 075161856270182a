"""Make the policy of this example: a small Qwen3 that finds greatest common divisors with a tool that subtracts, but is
hasty.

The warm start is supervised on a player that subtracts the smaller number from the larger until both are equal, and on
a hasty one that stops after some subtraction and guesses. The policy learns both, so it misses problems that it could
solve. Reinforcement learning takes the habit away, and episodes become as long as their problems: a dozen turns in the
middle, a hundred at the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from env import subtract
from reasoning_gym import create_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.environments.tools import ToolEnvironment, schema_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from chat_warm_start import (  # noqa: E402
    TOOL_TEMPLATE,
    Episode,
    Stage,
    episodes_of,
    make_model,
    make_tokenizer,
    save,
    warm_start,
)

NUMBERS = {"min_value": 1, "max_value": 300}
"""The range of the two numbers: 1 and 300 take 299 subtractions."""
TURNS = 128
"""Turns of an episode. One careful episode in a hundred has more than 100."""
HELD_OUT_SEED, HELD_OUT_SIZE = 900_000_000, 128
"""Far from any other seed in use: reasoning-gym draws problem i of seed s from Random(s + i)."""

CALL, AND, END_OF_CALL = '\n{"name": "subtract", "arguments": {"a": ', ', "b": ', "}}\n"
"""The text of a call that is the same in all of them; each is one token."""
FIXED = [CALL, AND, END_OF_CALL, "<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"]
ROLES = ["system\n", "user\n", "assistant\n"]
PATTERN = "|".join([*map(re.escape, FIXED), *ROLES, r"</?answer>|\d+| ?[A-Za-z]+|[\s\S]"])

SHORT, STEPS, BATCH_SIZE, LEARNING_RATE, HASTY = 6, (1200, 120), 24, (4e-3, 1.5e-3), 0.4
"""The calls are learnt from episodes that stop after a few turns, then how long episodes are from whole ones."""


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
    """Subtracts until both numbers are equal; after `stop` subtractions it answers `guess`."""
    a, b = numbers
    for said in heard[1:]:
        a, b = int(said), min(a, b)
    if a == b:
        return answer(a)
    if len(heard) - 1 == stop:
        return answer(guess)
    return f"<tool_call>{CALL}{max(a, b)}{AND}{min(a, b)}{END_OF_CALL}</tool_call>"


def demonstrations(stage: Stage, hasty: float, seed: int, count: int, most: int | None = None) -> Iterator[Episode]:
    """`count` episodes of careful players or, each with probability `hasty`, of one that stops and guesses; all stop
    after `most` subtractions, if that is given."""
    rng = random.Random(seed)
    for problem in problems(seed * 10_000_000, count):
        numbers = problem["metadata"]["numbers"]
        steps = careful_steps(*numbers)
        stop = rng.randrange(steps + 1) if rng.random() < hasty else steps + 1
        if most is not None:
            stop = rng.randrange(most + 1)
        guess = rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
        yield stage.play(stage.prompt(problem["question"]), partial(player, numbers, stop, guess), seed=0)


def measure(directory: Path) -> dict[str, Any]:
    """How often the policy in `directory` answers right, and in how many turns, in episodes as a run plays them."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    stage = stage_of(tokenizer)
    held_out = list(problems(HELD_OUT_SEED, HELD_OUT_SIZE))
    prompts = [stage.prompt(problem["question"]) for problem in held_out]
    groups = episodes_of(model, stage, prompts, n=4, seed=7, max_tokens=1024)
    right, turns = 0, []
    for problem, group in zip(held_out, groups, strict=True):
        for sample in group.samples:
            text = tokenizer.decode(sample.turn_ids(sample.turns - 1))
            right += f"<answer>{problem['answer']}</answer>" in text
            turns.append(sample.turns)
    turns.sort()
    careful = sorted(careful_steps(*problem["metadata"]["numbers"]) + 1 for problem in problems(5, 5000))
    return {
        "success": right / len(turns),
        "episodes": len(turns),
        "turns": percentiles(turns),
        "turns_of_careful_players": percentiles(careful),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }


def percentiles(ordered: Sequence[int]) -> dict[str, float]:
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: ordered[math.ceil(rank * len(ordered)) - 1] for name, rank in ranks.items()}
    return {"mean": sum(ordered) / len(ordered), **found}


def stage_of(tokenizer: Any) -> Stage:
    return Stage(ToolEnvironment({"subtract": subtract}), tokenizer, TURNS, [schema_of(subtract)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tokenizer and the warm-started policy of this example.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="directory for the model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the demonstrations")
    parser.add_argument("--figures", type=Path, default=HERE / "checkpoint.json", help="file for what was measured")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="on short episodes, and on whole ones")
    parser.add_argument("--measure", action="store_true", help="only measure the policy that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.measure:
        make(arguments)
    settings = {"seed": arguments.seed, "steps": arguments.steps, "batch_size": BATCH_SIZE, "peak_lr": LEARNING_RATE}
    figures = {"settings": {**settings, "hasty": HASTY}, "numbers": NUMBERS, **measure(arguments.output)}
    arguments.figures.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def make(arguments: argparse.Namespace) -> None:
    """Teach a policy, and save it."""
    torch.manual_seed(arguments.seed)
    started = time.process_time()
    tokenizer = make_tokenizer(pieces(), PATTERN, TOOL_TEMPLATE)
    model = make_model(tokenizer, hidden_size=64, layers=3, context=4096)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    stage = stage_of(tokenizer)
    for part, (steps, most, micro) in enumerate(zip(arguments.steps, (SHORT, None), (BATCH_SIZE, 4), strict=True)):
        taught = demonstrations(stage, HASTY, 2 * arguments.seed + part, steps * BATCH_SIZE, most)
        warm_start(model, taught, steps, BATCH_SIZE, LEARNING_RATE[part], micro)
    save(model, tokenizer, arguments.output)
    print(f"{time.process_time() - started:.0f} CPU s")


if __name__ == "__main__":
    main()
