"""TRL's `GRPOTrainer` with active partial rollouts.

Invariants:
- a training batch is N complete groups; the loss, the reward functions and the logs see the prompt and the columns of
  the row that a completion belongs to, never those of the row that the dataloader asked for;
- the policy ratio divides by the log-probabilities that tokens were drawn with, whichever version drew them; with
  `use_vllm` and its importance sampling correction, that correction does;
- evaluation generates for exactly the rows asked for, past the buffer;
- several processes are one job: one scheduler, one bound, one set of books, one `april.json` in a checkpoint;
- a checkpoint of TRL's holds everything that waits, and a run resumed from it trains on what the saved one would have.

Of TRL's private interface `_generate_and_score_completions` is overridden, to give it the rows and to add the
log-probabilities to what it returns; for tools and environments also `_tool_call_loop` and `_calculate_rewards`.
"""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from april.algorithms.corrections import Diagnostics, correct, diagnostics
from april.integrations.ranks import last_words
from april.integrations.requirement import require
from april.integrations.trl_episodes import completion
from april.integrations.trl_rollouts import (
    STATE,
    Checkpoint,
    PartialRollouts,
    TRLRollouts,
    partial_rollouts_of,
    read_state,
)
from april.reporting.alarms import Alarms

require("trl", "1.16", extra="trl")

import trl  # noqa: E402
from datasets import Dataset, IterableDataset  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

__all__ = ["GRPOTrainer", "PartialRollouts"]

logger = logging.getLogger(__name__)


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[name-defined,misc]
    """TRL's trainer; everything `trl.GRPOTrainer` takes, and how rollouts are generated.

    Args:
        partial_rollouts: unset: the defaults of `PartialRollouts`, with the embedded engine.

    Raises:
        ValueError: a setting of TRL's does not go with partial rollouts; the message names it and the remedy.
    """

    def __init__(self, *args: Any, partial_rollouts: PartialRollouts | None = None, **kwargs: Any) -> None:
        settings = partial_rollouts_of(partial_rollouts)
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        _refuse_arguments(given)
        config: Any = given.get("args")
        served = config is not None and config.use_vllm
        if served:
            settings = _server_of(config, settings)
            config.use_vllm = False  # TRL would set up a client and a process group of its own
        super().__init__(*args, **kwargs)
        if served:
            self.args.use_vllm = self.use_vllm = True
        _refuse_model(self)
        self.rollouts = TRLRollouts(self, settings)
        self.rollout_func = self._completions
        self._logprobs: Tensor | None = None
        """Log-probabilities of the latest forward pass, which `_compute_loss` has no other way to return."""
        self._drift = Diagnostics.none()
        """How far this process's samples were from on-policy, over the updates since the last log."""
        self._alarms = Alarms()
        self.add_callback(Checkpoint(self.rollouts))
        weakref.finalize(self, self.rollouts.close)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training, rollouts = self.model.training, self.rollouts
        if training:
            rollouts.train(inputs, self.state.global_step)
            inputs = [dict(row) for row, _ in rollouts.rows]
        else:
            rollouts.evaluate(inputs, self.state.global_step)
        rollouts.show(self)
        self._last_loaded_step = self.state.global_step  # with use_vllm: the server has these weights
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if training and not (self.use_vllm and self.vllm_importance_sampling_correction):
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logprobs = scores[0].detach()
        return scores

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        behaviour = inputs.get("sampling_per_token_logps")
        if self.model.training and behaviour is not None and self._logprobs is not None:
            mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
            correction = correct("behaviour", self._logprobs, self._logprobs, behaviour, mask)
            # Sums stay on the device until they are logged, so that no micro-batch waits for the GPU.
            self._drift = diagnostics(correction, self._logprobs, behaviour, mask) + self._drift.to(mask.device)
        return loss

    def _completions(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: what was just generated for this process, a row per sample."""
        parts = [completion(sample) for _, sample in self.rollouts.rows]
        assert len(parts) == len(prompts), "TRL asked for completions of other rows than it was given"
        prompt_ids, completion_ids, logprobs, _ = map(list, zip(*parts, strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def _tool_call_loop(self, *given: Any, **more: Any) -> Any:
        """TRL's, after its generation: april's episodes are played already."""
        assert self.rollouts.episodes is not None
        return self.rollouts.episodes.played(self.rollouts.rows)

    def _calculate_rewards(self, *given: Any, **more: Any) -> Any:
        """TRL's, with the environments that the completions were played with."""
        if self.rollouts.episodes is not None and self.environment_factories is not None:
            self.environments = self.rollouts.episodes.environments
        return super()._calculate_rewards(*given, **more)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a checkpoint brings back what waited when it was written.

        Raises:
            SystemExit: another process of the job has ended; the first to see it says how to go on.
        """
        job = self.rollouts.job
        try:
            with last_words(job, lambda what: how_to_go_on(Path(self.args.output_dir), what)):
                state = read_state(resume_from_checkpoint, self.args.output_dir) if job.leads else None
                self.rollouts.load_state_dict(state)
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.rollouts.loaded = None  # TRL may have gone back to the best checkpoint, or a step may be counted anew

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, with april's metrics of the rollouts since the last call under `april/`.

        `april/ess` and `april/kl_behaviour` are of the samples of process 0. The alarms of `april train` are logged as
        warnings.
        """
        if self.model.training and self.rollouts.job.leads:
            measured = self.rollouts.take_metrics()
            taken, self._drift = self._drift.metrics(), Diagnostics.none()
            if taken["tokens"]:
                measured |= {"ess": taken["ess"], "kl_behaviour": taken["kl_k3"]}
            for warning in self._alarms.observe({**logs, **measured}):
                logger.warning(warning)
            logs.update({f"april/{name}": value for name, value in measured.items()})
        super().log(logs, start_time)

    def close(self) -> None:
        """Stop the engine, and the servers that april started. It happens by itself when the program ends."""
        self.rollouts.close()


def how_to_go_on(directory: Path, what: str) -> str:
    """What has happened, and what to do, in one line."""
    saved = sorted(directory.glob(f"checkpoint-*/{STATE}"), key=lambda path: int(path.parent.name.split("-")[1]))
    again = (
        f'start the job again with trainer.train(resume_from_checkpoint="{saved[-1].parent}")'
        if saved
        else "nothing was saved yet: start the job again from the beginning, and set save_steps lower"
    )
    return f"april: {what}: {again}"


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """What `trl.GRPOTrainer` takes and partial rollouts cannot serve yet, before anything is loaded."""
    if arguments.get("rollout_func") is not None:
        raise ValueError(
            "rollout_func: it returns whole completions, which april could not interrupt; leave it out (tools and "
            "environment_factory do what it is there for), or use trl.GRPOTrainer"
        )
    if (dataset := arguments.get("train_dataset")) is not None:
        check_rows(dataset, prompts=arguments.get("environment_factory") is None)
    if (args := arguments.get("args")) is not None:
        check_arguments(args)
        if args.generation_kwargs:
            raise ValueError("generation_kwargs: april does not know them; leave them out")
        if args.remove_unused_columns:
            raise ValueError("remove_unused_columns = True: it takes the answers out of the rows; leave it at False")
        if args.use_transformers_continuous_batching:
            logger.warning(
                "use_transformers_continuous_batching = True is ignored: april's engine generates, with continuous "
                "batching of its own"
            )


def check_arguments(args: Any) -> None:
    """Settings of either trainer under which rollouts would not be what TRL's own would be."""
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty = {args.repetition_penalty}: april draws from the policy itself; leave it at 1"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process: start a process for each, by accelerate launch (GRPOTrainer), or show "
            "it one, by CUDA_VISIBLE_DEVICES=0"
        )


def _refuse_model(trainer: Any) -> None:
    kind, adapters = trainer.accelerator.distributed_type.value, getattr(trainer.model, "peft_config", {})
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED") and not trainer.accelerator.is_fsdp2:
        raise ValueError(
            f"{kind}: april's GRPOTrainer takes DDP, FSDP2 (--fsdp_version 2) and DeepSpeed; choose one of them"
        )
    if adapters and (trainer.accelerator.is_fsdp2 or trainer.is_deepspeed_enabled):
        raise ValueError(f"{kind}: adapters that are sharded are not merged yet; use DDP, or train without peft_config")
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            "processing_class: april's GRPOTrainer handles text; images and other modalities are not supported yet"
        )
    for name, config in adapters.items():
        if config.peft_type != "LORA" or config.use_dora or config.modules_to_save:
            raise ValueError(
                f"peft_config: adapter {name!r} ({config.peft_type.value}) is more than low-rank matrices: april only "
                "merges LoRA without use_dora and modules_to_save"
            )


def _server_of(args: Any, settings: PartialRollouts) -> PartialRollouts:
    """`use_vllm` as it is written: april drives that server."""
    if args.vllm_mode != "server":
        raise ValueError(
            f'vllm_mode = "{args.vllm_mode}": april drives a vLLM server (vllm_mode="server"), or vLLM in this process '
            'by PartialRollouts(engine="vllm-inproc") without use_vllm'
        )
    if args.vllm_structured_outputs_regex is not None:
        raise ValueError("vllm_structured_outputs_regex: april draws from the policy itself; leave it out")
    if settings.engine not in ("embedded", "vllm") or settings.urls:
        raise ValueError(
            f"use_vllm = True names the server already: leave engine = {settings.engine!r} and urls out of "
            "PartialRollouts"
        )
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
    url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
    return replace(settings, engine="vllm", urls=(url,))


def check_rows(dataset: Any, prompts: bool = True) -> None:
    """Refuse a dataset whose rows could not be saved with a checkpoint, or not be drawn from.

    Args:
        prompts: each row must have one.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(f"train_dataset is a {type(dataset).__name__}: pass a datasets.Dataset or IterableDataset")
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("train_dataset: it has no rows")
    if prompts and "prompt" not in first:
        raise ValueError(f'train_dataset: there is no column "prompt", only {", ".join(first) or "none"}')
    for column, value in first.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"train_dataset: column {column!r} holds a {type(value).__name__}, which cannot be saved with a "
                "checkpoint; turn it into text or numbers, or remove the column"
            ) from None
