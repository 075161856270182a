"""Settings of rollouts for TRL's trainers, and TRL settings that april does not support."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin

from april.config.engine_rules import check_engine
from april.config.error import ConfigError
from april.config.settings.engine_settings import EngineSettings
from april.images.store import NoImages
from april.integrations.settings import Settings
from april.integrations.trl.colocate import require_vllm
from april.integrations.trl.policy_images import policy_images
from april.integrations.trl.stored_images import has_images, is_image, replaced
from april.rollout.params import MAX_STALENESS, RolloutParams
from april.rollout.sampling import SamplingParams

logger = logging.getLogger(__name__)

OF_COLOCATED = ("max_num_seqs", "on_update", "stream_interval")
"""Settings of engines that apply to vLLM in the trainer's processes; `GRPOConfig` has the others."""


SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that `generation_kwargs` may override, as in TRL."""
WITHOUT_EFFECT = {"do_sample": True, "repetition_penalty": 1.0}
"""Values in `generation_kwargs` that change nothing."""


@dataclass(kw_only=True)
class PartialRollouts(EngineSettings):
    """Settings of rollouts: these, and all of `EngineSettings` (`engine`, `max_num_seqs`,
    `on_update`, `urls`, …).

    Args:
        over_sampling_batch_size: Number of prompts in flight (N'); auto chooses it for each generation batch.
        max_staleness: Maximum number of generation batches between a group's first token and its training update.
    """

    over_sampling_batch_size: int | Literal["auto"] = "auto"
    max_staleness: int = MAX_STALENESS

    def __post_init__(self) -> None:
        try:
            check_engine(self)
        except ConfigError as error:
            raise ValueError(f"PartialRollouts: {error}") from None
        if self.weight_transfer == "adapters":
            raise ValueError(
                "PartialRollouts: weight_transfer = \"adapters\": TRL's adapters may scale otherwise than april's, and "
                'are merged here: "disk" or "broadcast"'
            )

    def params(self, batch_size: int, group_size: int, bound: int) -> RolloutParams:
        """Return the rollout parameters: number of groups in flight and their staleness bound.

        Raises:
            ValueError: fewer groups than a batch, or more than the bound allows.
        """
        settings = Settings(over_sampling_batch_size=self.over_sampling_batch_size, max_staleness=bound)
        names = {"rollout_batch_size": "N (prompts a batch)", "n_samples_per_prompt": "num_generations"}
        return settings.params(batch_size, group_size, names, "{}", redraft=self.on_update == "redraft")


def sampling_of(args: Any, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters in the arguments of either of TRL's trainers."""
    overridden = getattr(args, "generation_kwargs", None) or {}
    temperature, top_p, top_k, min_p = (overridden.get(name, getattr(args, name)) for name in SAMPLED)
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k or 0,
        min_p=min_p or 0.0,
        stop_token_ids=stop_token_ids,
    )


def _refuse_generation_kwargs(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in SAMPLED and WITHOUT_EFFECT.get(name) != value:
            raise ValueError(
                f"generation_kwargs: {name} = {value!r}: april takes {', '.join(SAMPLED)} there; leave {name} out"
            )


def partial_rollouts_of(given: Any) -> PartialRollouts:
    if given is not None and not isinstance(given, PartialRollouts):
        raise ValueError(f"partial_rollouts is a {type(given).__name__}: pass PartialRollouts(...)")
    return given or PartialRollouts()


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise an error for arguments of `trl.GRPOTrainer` that april does not support, before anything is loaded."""
    if arguments.get("rollout_func") is not None:
        raise ValueError(
            "rollout_func: it returns whole completions, which april cannot interrupt; leave it out (use tools or "
            "environment_factory instead), or use trl.GRPOTrainer"
        )
    if (dataset := arguments.get("train_dataset")) is not None:
        check_rows(dataset, prompts=arguments.get("environment_factory") is None, images=True)
    if (args := arguments.get("args")) is not None:
        check_arguments(args)
        if args.use_vllm and dataset is not None and has_images(next(iter(dataset))):
            raise ValueError("use_vllm = True: TRL's vLLM gets no images from april; leave it at False")
        _refuse_generation_kwargs(args.generation_kwargs or {})
        if args.remove_unused_columns:
            raise ValueError("remove_unused_columns = True: it removes the answers from the rows; leave it at False")
        if args.use_transformers_continuous_batching:
            logger.warning(
                "use_transformers_continuous_batching = True is ignored: april's engine generates, with continuous "
                "batching of its own"
            )


def check_arguments(args: Any) -> None:
    """Raise an error for settings of either trainer that april does not support."""
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty = {args.repetition_penalty}: april samples from the unmodified policy; leave it at 1"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process: start a process for each, by accelerate launch (GRPOTrainer), or show "
            "it one, by CUDA_VISIBLE_DEVICES=0"
        )


def refuse_model(trainer: Any, merged_by_trl: bool) -> None:
    """Raise an error for a model, adapters or a way of sharding that april does not support.

    Args:
        merged_by_trl: whether TRL's code merges adapters for the engine, in place of april's.
    """
    kind, adapters = trainer.accelerator.distributed_type.value, getattr(trainer.model, "peft_config", {})
    if kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1: april's GRPOTrainer gathers no weights from it, and transformers is about to remove it; set "
            "fsdp_version: 2 in accelerate's configuration (--fsdp_version 2), or version: 2 in fsdp_config"
        )
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"):
        raise ValueError(
            f"{kind}: april's GRPOTrainer takes DDP, FSDP2 (--fsdp_version 2) and DeepSpeed; choose one of them"
        )
    if adapters and (trainer.accelerator.is_fsdp2 or trainer.is_deepspeed_enabled):
        raise ValueError(f"{kind}: adapters that are sharded are not merged yet; use DDP, or train without peft_config")
    for name, config in adapters.items():
        if not merged_by_trl and (config.peft_type != "LORA" or config.use_dora or config.modules_to_save):
            raise ValueError(
                f"peft_config: adapter {name!r} ({config.peft_type.value}) is more than low-rank matrices: april only "
                "merges LoRA without use_dora and modules_to_save"
            )


def refuse_images(trainer: Any, settings: PartialRollouts) -> None:
    """Raise an error for a processor, or rows with images, that april does not support with the other settings."""
    first = next(iter(trainer.train_dataset))
    if not isinstance(trainer.processing_class, ProcessorMixin):
        if has_images(first):
            raise ValueError(
                "train_dataset: its rows have images, but processing_class is a tokenizer: pass the policy's processor"
            )
        return
    for refused, reason in (
        (trainer.use_vllm, "TRL's vLLM gets no images from april; leave use_vllm at False"),
        (settings.engine != "embedded", f'engine = "{settings.engine}" gets no images from april; choose "embedded"'),
        (trainer.tools or trainer.environment_factories, "tools and environment_factory take prompts of text"),
        (trainer.accelerator.num_processes > 1, "april trains on images in one process only"),
    ):
        if refused:
            raise ValueError(
                f"processing_class is a {type(trainer.processing_class).__name__}, and {reason}; for text alone, pass "
                "its tokenizer"
            )
    if has_images(first) and trainer._tokenizer.padding_side != "left":
        raise ValueError(
            "processing_class: it pads on the right, and TRL's loss takes prompts for padded on the left; load it with "
            'padding_side="left"'
        )
    images = policy_images(trainer)
    if isinstance(images, NoImages) and has_images(first):
        raise ValueError(f"train_dataset: its rows have images, but {images.reason}")


def with_vllm(args: Any, settings: PartialRollouts) -> PartialRollouts:
    """Return `settings` with the vLLM that `use_vllm` names: a server, or an engine in each process.

    Raises:
        ValueError: april does not support a setting of TRL, or `settings` name another engine.
    """
    if args.vllm_structured_outputs_regex is not None:
        raise ValueError("vllm_structured_outputs_regex: april samples from the unmodified policy; leave it out")
    return _server_of(args, settings) if args.vllm_mode == "server" else _colocated(settings)


def _server_of(args: Any, settings: PartialRollouts) -> PartialRollouts:
    if settings.engine not in ("embedded", "vllm") or settings.urls:
        raise ValueError(
            f"use_vllm = True names the server already: leave engine = {settings.engine!r} and urls out of "
            "PartialRollouts"
        )
    # 0.0.0.0 is an address to listen on, not one to connect to.
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
    url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
    return replace(settings, engine="vllm", urls=(url,))


def _colocated(settings: PartialRollouts) -> PartialRollouts:
    require_vllm()
    for field in fields(EngineSettings):
        value = getattr(settings, field.name)
        if field.name not in OF_COLOCATED and value != getattr(PartialRollouts, field.name):
            raise ValueError(
                f'vllm_mode = "colocate" with {field.name} = {value!r} in PartialRollouts: GRPOConfig sets up vLLM '
                f"(vllm_...); leave {field.name} out"
            )
    return replace(settings, engine="vllm-inproc")


def check_rows(dataset: Any, prompts: bool = True, images: bool = False) -> None:
    """Raise an error for a dataset whose rows have no prompts, or cannot be saved with a checkpoint.

    Args:
        prompts: whether each row must have a prompt.
        images: whether rows may contain images of Pillow.
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
            json.dumps(replaced(value, lambda item: "" if images and is_image(item) else None))
        except TypeError:
            raise ValueError(
                f"train_dataset: column {column!r} holds a {type(value).__name__}, which cannot be saved with a "
                "checkpoint; turn it into text or numbers, or remove the column"
            ) from None
