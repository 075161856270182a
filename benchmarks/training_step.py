"""april's training step against TRL's `GRPOTrainer`, on the same samples and the same policy, on a CPU.

The samples are real rollouts of the quickstart recipe (groups whose rewards differ, as with dynamic sampling, so that
nothing can be skipped), with the log-probabilities recorded as they were drawn. Both sides compute the same update:
PPO clip on the recorded probabilities, mean over the batch's tokens, no KL term, gradient clipping, AdamW. The script
checks that the two gradients agree.

- `april`: `LocalLearner.train`: advantages, packed micro-batches, diagnostics by token age and all;
- `trl`: `GRPOTrainer.compute_loss` on micro-batches that TRL's own functions shuffle and split, without gradient
  checkpointing, then the same clipping and optimizer. Preparing the tensors is not in its time.

Memory: each side in a process of its own for each of several micro-batch sizes, the highest resident memory of its
second step above that before it. Time: both in one process, in turn, TRL with the fastest of its sizes, april with the
fastest of those that take no more memory than TRL then does.

    OMP_NUM_THREADS=2 python benchmarks/training_step.py
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from record import save, spread

from april import RolloutBatch, RolloutParams, RolloutScheduler
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.training.build import carries_signal
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.policy import load_policy, stop_tokens
from april.training.task_reward import TaskRewards

GROUPS = 16
TRIED = {"april": (512, 1024, 2048, 4096), "trl": (2, 4, 8, 16)}
"""Sizes of a micro-batch, in tokens and in samples."""


async def rollouts(recipe: Recipe) -> RolloutBatch:
    """A step of groups that carry signal."""
    model, tokenizer = load_policy(recipe.model)
    task = build_task(recipe.task)
    async with TaskRewards(task.scorer, tokenizer, recipe.rollout) as rewards:
        engine = EmbeddedEngine(
            model, max_num_seqs=128, context_length=recipe.engine.context_length, stream_interval=32
        )
        async with RolloutScheduler(
            engine,
            PromptStream(task, Encoder(tokenizer), seed=1),
            rewards,
            RolloutParams(
                rollout_batch_size=GROUPS,
                n_samples_per_prompt=recipe.rollout.n_samples_per_prompt,
                partial_rollout=False,
            ),
            sampling=recipe.sampling(stop_tokens(model, tokenizer)),
            dynamic_filter=carries_signal,
        ) as scheduler:
            return await scheduler.next_batch()


class April:
    def __init__(self, model: Any, recipe: Recipe, step: RolloutBatch, size: int) -> None:
        recipe.training.max_tokens_per_micro_batch = size
        self.learner = LocalLearner(model, LearnerSettings.of(recipe))
        self.model, self.step, self.number = model, step, 0

    def run(self) -> float:
        """One update; its gradient's norm."""
        self.number += 1
        return self.learner.train(self.step, self.number)["grad_norm"]


class TRL:
    def __init__(self, model: Any, recipe: Recipe, step: RolloutBatch, size: int) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

        samples = [sample for group in step.groups for sample in group.samples]
        parts = len(samples) // size
        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            num_generations=recipe.rollout.n_samples_per_prompt,
            max_completion_length=recipe.rollout.max_response_length,
            loss_type="dapo",
            beta=0.0,
            gradient_checkpointing=False,
            use_cpu=model.device.type == "cpu",
            bf16=False,
            report_to=[],
        )
        _, tokenizer = load_policy(recipe.model)
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * len(samples)}),
            processing_class=tokenizer,
        )
        self.trainer.current_gradient_accumulation_steps = parts
        self.model = self.trainer.model.train()
        self.training = recipe.training
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.training.learning_rate, betas=self.training.betas, weight_decay=0.0
        )
        torch.manual_seed(0)
        batch = tensors(
            samples, LocalLearner(copy.deepcopy(model), LearnerSettings.of(recipe)).prepare(step).advantages.cpu()
        )
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        self.parts = split_tensor_dict(shuffle_sequence_dict(batch), parts)

    def run(self) -> float:
        """One update; its gradient's norm."""
        self.optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            self.trainer.compute_loss(self.model, part).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
        self.optimizer.step()
        return float(norm)


def tensors(samples: list[Any], advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """The batch as TRL holds one: prompts padded on the left, responses on the right."""
    prompts, responses = max(len(s.prompt_ids) for s in samples), max(s.length for s in samples)
    shapes = {"prompt": (len(samples), prompts), "completion": (len(samples), responses)}
    batch = {
        f"{name}_{kind}": torch.zeros(shape, dtype=torch.long)
        for name, shape in shapes.items()
        for kind in ("ids", "mask")
    }
    old = torch.zeros(shapes["completion"])
    for row, sample in enumerate(samples):
        start = prompts - len(sample.prompt_ids)
        batch["prompt_ids"][row, start:] = torch.tensor(sample.prompt_ids)
        batch["prompt_mask"][row, start:] = 1
        batch["completion_ids"][row, : sample.length] = torch.tensor(sample.response_ids)
        batch["completion_mask"][row, : sample.length] = 1
        old[row, : sample.length] = torch.from_numpy(sample.logprobs)
    trained = batch["completion_mask"].sum()
    return {**batch, "old_per_token_logps": old, "advantages": advantages, "num_items_in_batch": trained}


SIDES: dict[str, Any] = {"april": April, "trl": TRL}


def build(name: str, recipe: Recipe, step: RolloutBatch, size: int) -> Any:
    model, _ = load_policy(recipe.model)
    return SIDES[name](model, copy.deepcopy(recipe), step, size)


def timed(side: Any) -> float:
    began = time.perf_counter()
    side.run()
    return time.perf_counter() - began


def peak_bytes(side: Any) -> int:
    """The highest resident memory of a step above that before it; Linux."""
    side.run()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    side.run()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured_apart(name: str, rolled: Path, size: int) -> int:
    command = [sys.executable, __file__, "--memory-of", name, "--rollouts", str(rolled), "--size", str(size)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--memory-of", choices=SIDES)
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--size", type=int)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    recipe = load_recipe(Path(__file__).parents[1] / "examples" / "gcd" / "recipe.toml")
    if options.memory_of:
        print(peak_bytes(build(options.memory_of, recipe, pickle.loads(options.rollouts.read_bytes()), options.size)))
        return
    step = asyncio.run(rollouts(recipe))
    rolled = Path(tempfile.mkdtemp()) / "step.pickle"
    rolled.write_bytes(pickle.dumps(step))
    tried: dict[str, dict[int, float]] = {name: {} for name in SIDES}
    peaks: dict[str, dict[int, int]] = {name: {} for name in SIDES}
    for name, sizes in TRIED.items():
        for size in sizes:
            side = build(name, recipe, step, size)
            side.run()
            tried[name][size] = min(timed(side) for _ in range(2))
            peaks[name][size] = measured_apart(name, rolled, size)
        print(f"{name}: {tried[name]} {peaks[name]}", flush=True)
    chosen = {"trl": min(tried["trl"], key=tried["trl"].__getitem__)}
    memory = peaks["trl"][chosen["trl"]]
    fitting = [size for size, peak in peaks["april"].items() if peak <= memory] or [min(TRIED["april"])]
    chosen["april"] = min(fitting, key=tried["april"].__getitem__)
    sides = {name: build(name, recipe, step, chosen[name]) for name in SIDES}
    norms = {name: side.run() for name, side in sides.items()}
    assert abs(norms["april"] - norms["trl"]) < 1e-3 * norms["trl"], f"the gradients differ: {norms}"
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(options.pairs):
        for name, side in sides.items():
            seconds[name].append(timed(side))
    samples = [sample for group in step.groups for sample in group.samples]
    tokens = sum(len(sample.prompt_ids) + sample.length for sample in samples)
    results = {
        "samples": len(samples),
        "tokens": tokens,
        "response_lengths": spread([sample.length for sample in samples]),
        "seconds_by_micro_batch": tried,
        "micro_batch": chosen,
        "gradient_norms": norms,
        "tokens_per_second": {name: spread([tokens / s for s in values]) for name, values in seconds.items()},
        "april_over_trl": spread([b / a for a, b in zip(seconds["april"], seconds["trl"], strict=True)]),
        "peak_bytes_by_micro_batch": peaks,
        "peak_bytes": {name: peaks[name][chosen[name]] for name in SIDES},
    }
    print(json.dumps(results, indent=2))
    print(save(__file__, results))


if __name__ == "__main__":
    main()
