"""Make the problems and the policy of this example: a small Qwen3 that calls the tool correctly, but has bad habits.

The warm start is supervised on a player that in each turn answers early with a guess (0.45), halves the range (0.4),
or tests any commit in it (0.15). That names the right commit in a quarter of the episodes; halving always does.
The policy learns the player's habits, and reinforcement learning has to find out which of them pays.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from agent import TESTS, TOOL, Build
from transformers import AutoModelForCausalLM, AutoTokenizer

from april import EnvStep, Turn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from chat_warm_start import (  # noqa: E402
    TOOL_TEMPLATE,
    Episode,
    Stage,
    episodes_of,
    make_model,
    make_tokenizer,
    rewards,
    save,
    warm_start,
)

COMMITS, SPAN = 20, 12
"""The number of the last commit, and how many commits may be the first bad one."""
HELD_OUT = (1, 4, 7)
"""Ranges of commits that reinforcement learning does not train on, by their first commits."""
EARLY, HALVES = 0.45, 0.4
"""How often the player answers early, and how often it halves."""

CALL, END_OF_CALL = '\n{"name": "run_tests", "arguments": {"commit": ', "}}\n"
"""The text of a call that is the same in all of them; each is one token."""
FIXED = [CALL, END_OF_CALL, "<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"]
WORDS = ["system\n", "user\n", "assistant\n", "run_tests", "good ", " bad ", "answer "]
PATTERN = "|".join([*map(re.escape, [*FIXED, *WORDS]), r"\d+", r"[\s\S]"])

STEPS, BATCH_SIZE, LEARNING_RATE = 3000, 32, 4e-3


class Bisection:
    """The agent's episodes as an environment, in which the player of the demonstrations acts."""

    def reset(self, prompt: dict[str, Any], seed: int) -> str:
        self.build = Build(prompt["good"], prompt["bad"], int(prompt["answer"]))
        self.tests = 0
        return ""

    def step(self, turn: Turn) -> EnvStep:
        calls = (turn.message or {}).get("tool_calls", ())
        if len(calls) != 1:
            return EnvStep(reward=float(turn.text == f"answer {self.build.first}"), done=True)
        self.tests += 1
        said = self.build.run_tests(calls[0]["function"]["arguments"]["commit"])
        return EnvStep([{"role": "tool", "name": "run_tests", "content": said}], done=self.tests > TESTS)

    def close(self) -> None:
        pass


def problems(span: int = SPAN) -> list[dict[str, Any]]:
    """Every problem with that many commits, as a record."""
    return [
        {"prompt": f"good {good} bad {good + span}", "answer": str(first), "good": good, "bad": good + span}
        for good in range(COMMITS - span + 1)
        for first in range(good + 1, good + span + 1)
    ]


def write_problems(folder: Path) -> None:
    """Write the records to train on, and the held-out ones."""
    for name, held_out in (("train", False), ("held_out", True)):
        records = [problem for problem in problems() if (problem["good"] in HELD_OUT) == held_out]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def player(rng: random.Random, known: str, early: float = EARLY, halves: float = HALVES) -> str:
    """The player's turn; `known` is the range that remains."""
    good, bad = map(int, re.findall(r"\d+", known))
    if bad - good == 1:
        return f"answer {bad}"
    habit = rng.random()
    if habit < early:
        return f"answer {rng.randint(good + 1, bad)}"
    commit = (good + bad) // 2 if habit < early + halves else rng.randint(good + 1, bad - 1)
    return f"<tool_call>{CALL}{commit}{END_OF_CALL}</tool_call>"


def prompt_of(stage: Stage, problem: dict[str, Any]) -> Any:
    return stage.prompt(problem["prompt"], **{key: problem[key] for key in ("answer", "good", "bad")})


def demonstrations(
    stage: Stage, seed: int, early: float = EARLY, halves: float = HALVES, least: int = SPAN
) -> Iterator[Episode]:
    """Episodes of the player without end, with `least` to `SPAN` commits."""
    rng, known = random.Random(seed), {span: problems(span) for span in range(least, SPAN + 1)}
    while True:
        problem = rng.choice(known[rng.randint(least, SPAN)])

        def say(heard: Sequence[str], first: str = problem["prompt"]) -> str:
            return player(rng, heard[-1] if len(heard) > 1 else first, early, halves)

        yield stage.play(prompt_of(stage, problem), say, seed=0)


def measure(directory: Path) -> dict[str, Any]:
    """How often the policy in `directory` names the commit, in episodes as a run plays them."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    stage = stage_of(AutoTokenizer.from_pretrained(directory))
    groups = episodes_of(model, stage, [prompt_of(stage, p) for p in problems()], n=4, seed=7, max_tokens=64)
    named = rewards(groups)
    turns = [sample.turns for group in groups for sample in group.samples]
    return {
        "success": sum(named) / len(named),
        "episodes": len(named),
        "turns_mean": sum(turns) / len(turns),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def tokenizer_of() -> Any:
    return make_tokenizer([*WORDS, *FIXED, "\n", *map(str, range(COMMITS + 1))], PATTERN, TOOL_TEMPLATE)


def stage_of(tokenizer: Any) -> Stage:
    return Stage(Bisection(), tokenizer, TESTS + 1, [TOOL])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make problems, tokenizer and warm-started policy of this example.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="directory for the model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the demonstrations")
    parser.add_argument("--figures", type=Path, default=HERE / "checkpoint.json", help="file for what was measured")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    parser.add_argument("--measure", action="store_true", help="only measure the policy that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.measure:
        make(arguments)
    settings = {"seed": arguments.seed, "steps": arguments.steps, "batch_size": BATCH_SIZE, "peak_lr": LEARNING_RATE}
    figures = {"settings": {**settings, "early": EARLY, "halves": HALVES}, **measure(arguments.output)}
    arguments.figures.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def make(arguments: argparse.Namespace) -> None:
    """Write the problems, teach a policy, and save it."""
    write_problems(HERE)
    torch.manual_seed(arguments.seed)
    started = time.process_time()
    tokenizer = tokenizer_of()
    model = make_model(tokenizer, hidden_size=64, layers=2, context=512)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    taught = demonstrations(stage_of(tokenizer), arguments.seed, least=1)  # so that short ranges are frequent
    warm_start(model, taught, arguments.steps, BATCH_SIZE, LEARNING_RATE, micro=BATCH_SIZE)
    save(model, tokenizer, arguments.output)
    print(f"{time.process_time() - started:.0f} CPU s")


if __name__ == "__main__":
    main()
