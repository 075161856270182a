"""Settings of optimisation, evaluation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    NotNegative,
    Positive,
    SecondsOrZero,
)
from april.rollout.trajectory.routes import RouterReplay


@dataclass(kw_only=True)
class TrainingSettings:
    """Optimisation, evaluation and checkpoints.

    Args:
        steps: Training steps.
        updates_per_step: Optimizer updates per step; the batch is divided by whole groups.
        learning_rate: Peak learning rate of AdamW.
        critic_learning_rate: ppo: Peak learning rate of the critic.
        lr_schedule: Decay of the learning rates from the peak to zero at the last step.
        warmup_steps: Steps of linear warm-up.
        betas: AdamW's decay rates.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradient norm to which larger gradients are clipped.
        max_tokens_per_micro_batch: Tokens in one forward and backward pass, including padding for architectures that
            need it. Halved automatically when memory runs out.
        max_skipped_updates: Maximum number of consecutive updates skipped because the loss or gradient is not finite;
            then the run stops. Their batches are saved in the directory `skipped` of the run.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        router_replay: Choice of a token's experts in training, for mixtures of experts. off: the trainer's routers.
            recorded: as the engine chose when it drew the next token; the experts' weights are computed by the trainer.
            latest: as the engine chose when it last computed the token. Where the engine's choice was lost, the
            trainer's routers choose. With the embedded engine, vLLM or SGLang.
        seed: Seed of data order, sampling and initialisation.
        threads: CPU threads of PyTorch; unset: PyTorch's default.
        eval_interval: Steps between evaluations on held-out problems; 0: only before and after training.
        eval_samples: Samples per held-out problem; accuracy is the mean over them.
        eval_temperature: Sampling temperature of evaluations; unset: temperature.
        save_interval: Steps between checkpoints; 0: only at the end.
        keep_checkpoints: Number of newest checkpoints kept on disk.
        journal_flush_seconds: Longest time in seconds before the journal writes an event to disk: a crash loses at most
            this many seconds of rollouts. 0 writes every token before generation continues.
    """

    steps: Positive[int] = 100
    updates_per_step: Positive[int] = 1
    learning_rate: Positive[float] = 1e-6
    critic_learning_rate: Positive[float] = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NotNegative[int] = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NotNegative[float] = 0.0
    max_grad_norm: Positive[float] = 1.0
    max_tokens_per_micro_batch: Positive[int] = 8192
    max_skipped_updates: Positive[int] = 3
    gradient_checkpointing: bool = False
    router_replay: RouterReplay = "off"
    seed: NotNegative[int] = 0
    threads: Positive[int] | None = None
    eval_interval: NotNegative[int] = 10
    eval_samples: Positive[int] = 4
    eval_temperature: NotNegative[float] | None = None
    save_interval: NotNegative[int] = 50
    keep_checkpoints: Positive[int] = 2
    journal_flush_seconds: SecondsOrZero = 1.0
