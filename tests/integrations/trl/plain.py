"""Plain TRL on the same tokens as april's trainer with N' = N, so that every metric can be compared.

Its `rollout_func` sends the same prompts with the same seeds to the same engine. Everything else is TRL's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from april.engines.embedded import EmbeddedEngine
from april.integrations.adapter import RolloutAdapter
from april.integrations.trl import GRPOTrainer, PartialRollouts
from april.integrations.trl.prompts import encoder
from april.integrations.trl.settings import sampling_of
from april.rollout.event_loop import EventLoop
from april.rollout.params import RolloutParams
from april.rollout.trajectory.group import Group
from tests import tiny
from tests.integrations.trl.trainer import Reward, rows

CLOSE = 2e-4
"""Relative and absolute: the engine computes in batches of other shapes than TRL's forward pass."""
TIMES = ("time", "runtime", "per_second")


class Plain:
    """TRL's `rollout_func`."""

    def __init__(self) -> None:
        self.adapter: RolloutAdapter | None = None
        self.loop = EventLoop()
        self.step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        encode = encoder(trainer.processing_class, trainer.chat_template, trainer.chat_template_kwargs)
        if self.adapter is None:
            engine = EmbeddedEngine(trainer.accelerator.unwrap_model(trainer.model), max_num_seqs=16, stream_interval=2)
            batch = trainer.args.generation_batch_size // trainer.num_generations
            self.adapter = RolloutAdapter(
                engine,
                RolloutParams(
                    rollout_batch_size=batch,
                    n_samples_per_prompt=trainer.num_generations,
                    over_sampling_batch_size=batch,
                ),
                sampling=sampling_of(trainer.args, tuple(sorted(trainer.eos_token_ids))),
                seed=trainer.args.seed,
            )
        if trainer.model.training:
            if self.step is not None:
                self.loop.run(self.adapter.update_weights())
            self.step = trainer.state.global_step
            asked = [encode({"prompt": prompt}) for prompt in prompts[:: trainer.num_generations]]
            groups: list[Group] = self.loop.run(self.adapter.rollout(asked)).groups
        else:
            self.loop.run(self.adapter.update_weights(version=self.adapter.version))
            groups = self.loop.run(self.adapter.evaluate([encode({"prompt": prompt}) for prompt in prompts]))
        samples = [sample for group in groups for sample in group.samples]
        return {
            "prompt_ids": [list(sample.prompt_ids) for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
        }


def metrics(folder: Path, ours: bool, settings: dict[str, Any]) -> list[dict[str, float]]:
    """What a run of `settings` logged, without times and without what only april has."""
    settings = dict(settings)
    config = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    dataset = rows().to_iterable_dataset() if settings.pop("streamed", False) else rows()
    common = {
        "model": AutoModelForCausalLM.from_pretrained(tiny.save(folder / "model"), dtype=torch.float32),
        "reward_funcs": Reward(),
        "args": trl.GRPOConfig(**{**config, **settings}),
        "train_dataset": dataset,
        "eval_dataset": rows(4, first=100),
        "processing_class": tiny.tokenizer(),
    }
    if ours:
        n = common["args"].generation_batch_size // 4
        partial = PartialRollouts(over_sampling_batch_size=n, max_num_seqs=16, stream_interval=2)
        # With use_vllm both arms sample from the embedded engine in place of the server: the test compares the rest.
        with mock.patch("april.integrations.trl.trainer.with_vllm", lambda args, settings: settings):
            made: Any = GRPOTrainer(**common, partial_rollouts=partial)
        made.train()
        made.close()
    else:
        plain = Plain()
        with mock.patch.object(grpo_trainer, "VLLMGeneration"):
            made = trl.GRPOTrainer(**common, rollout_func=plain)
        made.train()
        plain.loop.close()
    return [
        {name: value for name, value in entry.items() if "april/" not in name and not any(t in name for t in TIMES)}
        for entry in made.state.log_history
    ]


def differences(ours: list[dict[str, float]], plain: list[dict[str, float]]) -> list[str]:
    """Each metric that is not the same in both."""
    found = []
    assert len(ours) == len(plain)
    for our, other in zip(ours, plain, strict=True):
        if our.keys() != other.keys():
            found.append(f"step {our['step']}: {sorted(our.keys() ^ other.keys())}")
        for name in our.keys() & other.keys():
            if our[name] != other[name] and not math.isclose(our[name], other[name], rel_tol=CLOSE, abs_tol=CLOSE):
                found.append(f"step {our['step']}: {name} {our[name]} where plain TRL has {other[name]}")
    return found


torch.set_num_threads(1)
