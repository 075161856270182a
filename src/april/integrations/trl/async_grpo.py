"""TRL's `AsyncGRPOTrainer` with active partial rollouts: generation overlaps training.

A batch is what the trainer takes between two weight syncs. TRL's data loader reads into batch k + 1 before the trainer
has trained on batch k, so a batch is taken one sync ahead. Generation of later groups continues, and is interrupted for
the sync only. The scheduler's bound counts from the sync at which a batch is trained on, as TRL's own bound does, and
no sample is dropped for it.

With several processes (DDP, FSDP2), only process 0 generates or drives servers, as with TRL's own worker: TRL
distributes its rows, and gathers weights for it. TRL merges adapters into the weights.

Invariants:
- weights change only while nothing is in flight, and no batch is being taken;
- the number of batches handed over and not trained on is the number of steps that the scheduler counts as in training;
- every group that the scheduler hands over is put on the trainer's queue once, complete, with adjacent rows;
- `check_health` reports a worker that has failed, with its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

from april.integrations.peer_loss import peer_loss_reported
from april.integrations.trainer_ranks import TrainerRanks
from april.integrations.trl.checkpoint import Checkpoint, read_state, resume_hint
from april.integrations.trl.rollout_worker import RolloutWorker
from april.integrations.trl.settings import PartialRollouts, check_arguments, check_rows, partial_rollouts_of

NO_TRANSFER: Any = object()
"""Weight transfer of processes other than 0. With it, TRL does not ask a vLLM server whether it supports adapters."""


class AsyncGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """TRL's asynchronous trainer. It takes all arguments of TRL's but `rollout_worker`, `weight_transfer` and
    `environment_factory`.

    Args:
        tools: as in TRL; they are called in this process, and need not be picklable.
        partial_rollouts: settings of rollouts; the staleness bound is the config's `max_staleness`. The embedded engine
            generates with its own copy of the model.

    Raises:
        ValueError: april does not support a setting of TRL.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        partial_rollouts: PartialRollouts | None = None,
        **more: Any,
    ) -> None:
        settings = partial_rollouts_of(partial_rollouts)
        args = args or AsyncGRPOConfig(f"{Path(model).name}-AsyncGRPO")
        check_arguments(args)
        if args.deepspeed_plugin is not None:
            raise ValueError(
                "DEEPSPEED: TRL's AsyncGRPOTrainer gathers weights of DDP and FSDP2 only; choose one of them, or "
                "april's GRPOTrainer"
            )
        if more.get("environment_factory") is not None:
            raise ValueError(
                "environment_factory: april's AsyncGRPOTrainer does not support environments; use tools, april's "
                "GRPOTrainer, or TRL's own"
            )
        adapter = more.get("peft_config")
        if adapter is not None and adapter.peft_type != "LORA":
            raise ValueError(f"peft_config: {adapter.peft_type.value} was not run with april; only LoRA is supported")
        if args.token_budget is not None and args.token_budget > 0:
            raise ValueError(
                f"token_budget = {args.token_budget}: april counts the samples of an update, which a token budget "
                "changes from one to the next; leave it out"
            )
        args.token_budget = 0
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        tokenizer = processing_class or AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        check_rows(train_dataset)
        self.job = TrainerRanks()
        worker = None
        if self.job.leads:
            worker = RolloutWorker(model, functions, args, train_dataset, tokenizer, settings, tools or ())
        try:
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                tokenizer,
                rollout_worker=worker,
                weight_transfer=worker or NO_TRANSFER,
                **more,
            )
        # Otherwise the engine, and servers that april started, would outlive a trainer that was not constructed.
        except BaseException:
            if worker is not None:
                worker.stop()
            raise
        self.rollouts = worker
        if worker is not None:
            self.add_callback(Checkpoint(worker))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. A checkpoint restores the groups that were unfinished when it was written.

        Raises:
            SystemExit: another process of the job has ended. The first process that notices prints how to resume.
        """
        with peer_loss_reported(self.job, lambda what: resume_hint(Path(str(self.args.output_dir)), what)):
            if self.rollouts is not None:
                state = read_state(resume_from_checkpoint, self.args.output_dir)
                if state is not None:
                    self.rollouts.load_state_dict(state)
            return super().train(resume_from_checkpoint, *args, **kwargs)
