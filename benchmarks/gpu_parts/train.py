"""`april train` from start to end, synchronous and partial: random weights, records, a reward of the user's own.

The policy ends a response by one of its end tokens, 2 % of the vocabulary, so lengths have a geometric distribution.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_parts.bench import Bench
from parts import Figures
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ARMS = {"synchronous": ["--no-partial-rollout"], "partial": []}
RECIPE = """
[model]
path = {model}
device = {device}
[task]
kind = "records"
path = {records}
reward = {reward}
eval_size = 0
[rollout]
rollout_batch_size = {n}
over_sampling_batch_size = {more}
n_samples_per_prompt = 4
max_response_length = {longest}
max_staleness = 3
stop_token_ids = {ends}
reward_workers = 0
[engine]
max_num_seqs = {slots}
context_length = {context}
[training]
steps = {steps}
learning_rate = 1e-6
max_tokens_per_micro_batch = {micro}
eval_interval = 0
save_interval = {steps}
"""
REWARD = '''
def parity(response, answer, length):
    """1 for an even number of tokens."""
    return float(length % 2 == 0)
'''
KEPT = ("grad_norm", "loss", "tokens_per_second", "occupancy", "mean_staleness", "update_share")


def measure(bench: Bench) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepared(bench, folder)
        walls = {}
        for arm, flags in ARMS.items():
            output = folder / arm
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "april", "train", str(recipe), "--output", str(output), *flags],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            walls[arm] = time.perf_counter() - began
            if done.returncode:
                yield (
                    "failures",
                    [f"{arm}: exit status {done.returncode}", *(done.stdout + done.stderr).splitlines()[-8:]],
                )
                return
            yield arm, {"wall_seconds": walls[arm], "steps": metrics(output / "metrics.jsonl")}
    yield "failures", []


def metrics(path: Path) -> list[dict[str, Any]]:
    """The steps' metrics of the results and the duration of training."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in s.items() if k == "step" or "second" in k or k.split("/")[-1] in KEPT} for s in steps]


def prepared(bench: Bench, folder: Path) -> Path:
    """The recipe, with a model, a tokenizer that has a word for each token, and records."""
    size = bench.shape.vocabulary
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w0")
    model = folder / "model"
    bench.model(bench.shape, torch.bfloat16).save_pretrained(model)
    tokenizer.save_pretrained(model)
    records = [
        {"prompt": " ".join(f"w{2 + (7 * i + j) % (size - 2)}" for j in range(32)), "answer": ""} for i in range(64)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(REWARD)
    longest, n = bench.size(256, 24), bench.size(16, 2)
    text = RECIPE.format(
        model=json.dumps(str(model)),
        device=json.dumps(bench.device),
        records=json.dumps(str(folder / "records.jsonl")),
        reward=json.dumps(f"{folder / 'reward.py'}:parity"),
        n=n,
        more=n + n // 2,
        longest=longest,
        ends=[2 + 50 * i for i in range(size // 50)],
        slots=4 * n,
        context=longest + 64,
        steps=bench.size(4, 2),
        micro=8 * longest,
    )
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"
