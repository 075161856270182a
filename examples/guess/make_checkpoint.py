"""Make the policy of this example: a small Qwen3 that guesses numbers within the hints, but without a plan.

The warm start is supervised on a player that guesses any number within the hints. That succeeds about half of the time
(0.49 of 63 numbers in 6 turns); halving the remaining numbers always succeeds. The best guess is not in the
demonstrations: reinforcement learning has to find it. A turn begins with the bounds of the number, so that the policy
need not remember them: `00-64 20`, then `20-64 50` if that was too low.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from env import Guess
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from chat_warm_start import (  # noqa: E402
    Episode,
    Stage,
    episodes_of,
    make_model,
    make_tokenizer,
    rewards,
    save,
    warm_start,
)

MOST, TURNS = 63, 6
PROMPT = f"guess 1 to {MOST}"
PIECES = ["user\n", "assistant\n", *"\n- ", "guess ", " to ", *["higher", "lower", "again"], *"0123456789"]
PATTERN = r"user\n|assistant\n|guess | to |higher|lower|again|[\s\S]"
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STEPS, BATCH_SIZE, LEARNING_RATE = 1500, 24, 4e-3


def consistent(rng: random.Random, said: list[int], heard: Sequence[str]) -> str:
    """Return the bounds of the number and a random number within them; the number is appended to the earlier guesses in
    `said`."""
    low, high = 0, MOST + 1
    for number, hint in zip(said, heard[1:], strict=True):
        low, high = (number, high) if hint == "higher" else (low, number)
    said.append(rng.randrange(low + 1, high))
    return f"{low:02}-{high:02} {said[-1]:02}"


def demonstrations(stage: Stage, seed: int) -> Iterator[Episode]:
    """Episodes of the player that only keeps to the hints, without end."""
    rng, prompt = random.Random(seed), stage.prompt(PROMPT)
    while True:
        said: list[int] = []
        yield stage.play(prompt, lambda heard, said=said: consistent(rng, said, heard), rng.getrandbits(32))  # type: ignore[misc]


def measure(directory: Path) -> dict[str, Any]:
    """How often the policy in `directory` finds the number, in episodes as a run plays them."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    stage = Stage(Guess(MOST, TURNS, package="own"), tokenizer, TURNS)
    groups = episodes_of(model, stage, [stage.prompt(PROMPT)] * 100, n=4, seed=7, max_tokens=64)
    won = rewards(groups)
    turns = [sample.turns for group in groups for sample in group.samples]
    return {
        "success": sum(won) / len(won),
        "episodes": len(won),
        "turns_mean": sum(turns) / len(turns),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tokenizer and the warm-started policy of this example.")
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
    figures = {"settings": settings, "numbers": MOST, "turns": TURNS, **measure(arguments.output)}
    arguments.figures.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def make(arguments: argparse.Namespace) -> None:
    """Teach a policy, and save it."""
    torch.manual_seed(arguments.seed)
    started = time.process_time()
    tokenizer = make_tokenizer(PIECES, PATTERN, TEMPLATE)
    model = make_model(tokenizer, hidden_size=64, layers=2, context=256)
    stage = Stage(Guess(MOST, TURNS, package="own"), tokenizer, TURNS)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    warm_start(model, demonstrations(stage, arguments.seed), arguments.steps, BATCH_SIZE, LEARNING_RATE, micro=24)
    save(model, tokenizer, arguments.output)
    print(f"{time.process_time() - started:.0f} CPU s")


if __name__ == "__main__":
    main()
