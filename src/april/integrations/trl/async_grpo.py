"""TRL's `AsyncGRPOTrainer` with active partial rollouts: generation goes on beside training (`RolloutScheduler.take`).

A batch is what the trainer takes between two weight syncs. TRL's data loader reads into batch k + 1 before it has
trained on batch k, so a batch is taken one sync ahead; generation goes on for those behind it, and is interrupted for
the sync alone. The scheduler's bound counts from the sync at which a batch is trained on, so it is TRL's own, and
nothing is ever dropped for it.

Of several processes (DDP, FSDP2), process 0 alone generates or drives servers, as with TRL's own worker: TRL deals its
rows out, and gathers weights for it. Adapters come merged into the weights, by TRL.

Invariants:
- weights change only while nothing is in flight, and no batch is being taken;
- batches handed over and not trained on are as many as steps that the scheduler counts as in training;
- every group that the scheduler hands over is put on the trainer's queue once, whole, its rows one after the other;
- a worker that has failed is reported by `check_health`, with its cause.
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
from april.integrations.trl.checkpoint import Checkpoint, how_to_go_on, read_state
from april.integrations.trl.rollout_worker import AsyncRollouts
from april.integrations.trl.settings import PartialRollouts, check_arguments, check_rows, partial_rollouts_of

NO_TRANSFER: Any = object()
"""What processes other than 0 give TRL, which then asks no vLLM server, in any of them, whether it takes adapters."""


class AsyncGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """TRL's asynchronous trainer; what it takes but `rollout_worker`, `weight_transfer` and `environment_factory`.

    Args:
        tools: as TRL's own; they are called in this process, and need not be picklable.
        partial_rollouts: how rollouts are generated; the staleness bound is the config's `max_staleness`. The embedded
            engine generates from a copy of the model of its own.

    Raises:
        ValueError: a setting of TRL's does not go with partial rollouts; the message names it and the remedy.
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
                "environment_factory: april's AsyncGRPOTrainer asks no environment for its reward; use tools, april's "
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
            worker = AsyncRollouts(model, functions, args, train_dataset, tokenizer, settings, tools or ())
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
        except BaseException:
            if worker is not None:
                worker.stop()
            raise
        self.rollouts = worker
        if worker is not None:
            self.add_callback(Checkpoint(worker))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a checkpoint brings back what waited when it was written.

        Raises:
            SystemExit: another process of the job has ended; the first to see it says how to go on.
        """
        with peer_loss_reported(self.job, lambda what: how_to_go_on(Path(str(self.args.output_dir)), what)):
            if self.rollouts is not None:
                state = read_state(resume_from_checkpoint, self.args.output_dir)
                if state is not None:
                    self.rollouts.load_state_dict(state)
            return super().train(resume_from_checkpoint, *args, **kwargs)
