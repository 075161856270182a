"""Model, tokenizer and device of the policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from april.config.error import ConfigError
from april.config.settings.model_settings import ModelSettings
from april.engines.pretrained import (
    ModelFolderError,
    end_tokens,
    load_model,
    load_tokenizer,
    write_image_processor,
)
from april.training.lora import Adapters
from april.training.offload import Readable, identity
from april.training.sharded_files import write
from april.training.stored_names import Parts, stored_buffers, stored_parts, stored_sources, stored_tensors


def load_policy(
    settings: ModelSettings, checkpoint: Path | None = None, device: torch.device | None = None
) -> tuple[Any, Any]:
    """Load the causal LM and its tokenizer, from the recipe's path or from a checkpoint.

    Args:
        device: overrides the device in the settings.

    Raises:
        ConfigError: the model does not exist or is no causal LM, or the device cannot be used.
    """
    device = device or device_of(settings)
    path = str(checkpoint or Path(settings.path).expanduser())
    try:
        tokenizer = load_tokenizer(path)
        model = load_model(path, getattr(torch, settings.dtype))
    except ModelFolderError as error:
        raise ConfigError(str(error) if checkpoint else f"model.path = {settings.path!r}: {error}") from None
    return model.to(device), tokenizer


def save_policy(
    directory: Path,
    model: Any,
    tokenizer: Any,
    adapters: Adapters | None = None,
    values: Readable = identity,
) -> None:
    """Write the policy with merged adapters, in transformers' format.

    Args:
        values: maps each of the model's parameters to the tensor to write.
    """
    types = (tensor.dtype for tensor in stored_tensors(model, values).values() if tensor.is_floating_point())
    describe_policy(directory, model, tokenizer, next(types))
    write_policy(directory, model, stored_parts(model), adapters, values)


@torch.no_grad()
def write_policy(
    directory: Path,
    model: Any,
    parts: Parts,
    adapters: Adapters | None = None,
    values: Readable = identity,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Write this rank's rows of the policy's tensors, one tensor at a time; no copy of all of them is made.

    Args:
        dtype: type of the parameters in the files; unchanged if None.
    """
    tensors, sources = stored_tensors(model, values), stored_sources(model, adapters, values)
    write(directory, "model", tensors, rank, lambda name: sources[name](), dtype, parts, stored_buffers(model))


def describe_policy(directory: Path, model: Any, tokenizer: Any, dtype: torch.dtype | None = None) -> None:
    """Write configuration and tokenizer in transformers' format.

    Args:
        dtype: type of the parameters in the files; None for the configuration's.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_image_processor(model, directory)


def device_of(settings: ModelSettings) -> torch.device:
    """Return the recipe's device; `auto` is the first accelerator, or the CPU.

    Raises:
        ConfigError: PyTorch does not know the device, or cannot compute on it.
    """
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
        # `torch.device` accepts devices that do not exist; only a computation shows that it works.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.device = {settings.device!r}: PyTorch cannot compute on it here ({reason}); choose auto, cpu, cuda "
            "or cuda:N"
        ) from None
    return device


def trunk_of(model: Any) -> Any:
    """Return the causal LM without its head."""
    if model.base_model is not model:
        return model.base_model
    # Llama 4's text model has its trunk under another name than its class declares.
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def gpu_bytes(settings: ModelSettings) -> int | None:
    """Return the memory of the GPU that trains the policy; None without a GPU."""
    device = device_of(settings)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that end a response: the end-of-sequence tokens of model and tokenizer."""
    try:
        named = end_tokens(model)
    except ModelFolderError as error:
        raise ConfigError(str(error)) from None
    own = tokenizer.eos_token_id
    return tuple(sorted({*named, *(() if own is None else (own,))}))
