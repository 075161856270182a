"""Loading a causal LM and its tokenizer from a folder or from the Hugging Face hub.

Invariants:
- no parameter of a policy has random values: every parameter of its architecture is read, or the model is refused;
- an error names the file that cannot be read, and a remedy;
- code that comes with a model is never run.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from april.images.support import reads_images

log = logging.getLogger(__name__)

LEFT_OUT = "tensors_left_out"
"""Entry of a model's configuration: stored tensors that its architecture has no parameter for (`left_out`)."""

IMAGE_PROCESSOR = "image_processor_files"
"""Attribute of a loaded model: content of the files with its image processor's settings, by name."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configurations use for the number of experts of a layer."""
GROUPED = ("grouped_mm", "batched_mm")
"""Implementations of transformers that compute all experts of a layer in few kernels."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NAMED = 3
"""Maximum number of tensors that a message names."""


class ModelFolderError(ValueError):
    """A model that cannot be loaded; the message is one line."""


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of the model at `path`, a folder or a hub name.

    Raises:
        ModelFolderError: there is none, or it cannot be read.
    """
    check_configuration(path)
    with _reading(path, "tokenizer", _TOKENIZER):
        # Without this argument, transformers prompts for permission to run code that comes with a model.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_model(path: str, dtype: torch.dtype) -> Any:
    """Load the causal LM at `path`, a folder or a hub name.

    Tensors that the architecture has no parameter for are entered into its configuration as `LEFT_OUT`. Files of an
    image processor are kept as `IMAGE_PROCESSOR`.

    Raises:
        ModelFolderError: a file cannot be read, or tensors are missing or have other shapes than the architecture's.
    """
    transformers_logging.disable_progress_bar()
    check_configuration(path)
    # transformers replaces a generation configuration that it cannot read by defaults, without an error: read it first.
    with _reading(path, "generation configuration", ("generation_config.json",)):
        if _file(path, "generation_config.json"):
            GenerationConfig.from_pretrained(path, trust_remote_code=False)
    loaded: Any
    # With ignore_mismatched_sizes, tensors of other shapes are in the report, and the error below names them.
    with _reading(path, "causal LM", ()):
        loaded = auto_class(AutoConfig.from_pretrained(path, trust_remote_code=False)).from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelFolderError(
            f"{_weights(path)}: {len(missing)} tensors of {type(model).__name__} are missing, {_some(missing)}: "
            "training would start from random values; copy all files of the model again, or correct config.json"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = (f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in mismatched)
        raise ModelFolderError(
            f"{_weights(path)}: {len(mismatched)} tensors have other shapes than config.json gives them, "
            f"{_some(shapes)}: copy all files of the same model again"
        )
    # transformers would cast integers to `dtype`, which gives meaningless weights.
    if integers := sorted(_integers(path, model)):
        raise ModelFolderError(
            f"{_weights(path)}: {len(integers)} tensors are stored as integers, {_some(integers)}, and config.json has "
            "no quantization_config that says what they mean: use the model that was not quantized"
        )
    if unused := left_out(model, [*report["unexpected_keys"], *_ignored(path, model)]):
        log.warning(
            "%s: %s has no place for the tensors %s: they are not trained, and checkpoints lack them",
            path,
            type(model).__name__,
            ", ".join(unused),
        )
        setattr(model.config, LEFT_OUT, unused)
    if experts := experts_of(model):
        by = log.info if experts in GROUPED else log.warning
        by("%s: the experts of a layer are computed by %s", path, experts)
    if reads_images(model.config):
        # Read now: a resumed run deletes the checkpoint that it was loaded from.
        files = {name: file for name in _IMAGE_PROCESSOR if (file := _file(path, name))}
        setattr(model, IMAGE_PROCESSOR, {name: file.read_bytes() for name, file in files.items()})
    return model


def write_image_processor(model: Any, directory: Path) -> None:
    """Write the settings of a loaded model's image processor, if it has one, as other engines read them."""
    for name, content in getattr(model, IMAGE_PROCESSOR, {}).items():
        (directory / name).write_bytes(content)


def auto_class(config: Any) -> Any:
    """Return transformers' class that makes the model of a configuration: of a causal LM, or of one with images."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known or not reads_images(config) else AutoModelForImageTextToText


def experts_of(model: Any) -> str:
    """Return how transformers computes the experts of a layer, `grouped_mm` where it can; "" without experts.

    grouped_mm is one matrix product for all experts, and needs an Ampere GPU or a newer one; eager is one for each.
    """
    config = model.config.get_text_config()
    mixture = any(getattr(config, name, None) for name in EXPERTS)
    return str(getattr(config, "_experts_implementation", None) or "eager") if mixture else ""


def end_tokens(model: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the model's generation configuration.

    Raises:
        ModelFolderError: one of them is no token.
    """
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = declared if isinstance(declared, list | tuple) else [] if declared is None else [declared]
    vocabulary = model.get_input_embeddings().num_embeddings
    for token in named:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ModelFolderError(
                f"generation_config.json: eos_token_id = {declared!r}: {token!r} is no token of the {vocabulary} that "
                "the model has"
            )
    return tuple(sorted(set(named)))


def left_out(model: Any, stored: Iterable[str]) -> list[str]:
    """Return the shortest prefixes that distinguish tensors without a parameter in `model` from its parameters."""
    known = set()
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        parts = name.split(".")
        known |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    found = set()
    for name in stored:
        parts = name.split(".")
        # The shortest unknown prefix is the one whose parent is known.
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found |= {prefix for prefix in prefixes if prefix not in known and prefix.rpartition(".")[0] in known | {""}}
    return sorted(found)


def _ignored(path: str, model: Any) -> Iterator[str]:
    """Yield the stored tensors that the architecture skips and transformers does not report, such as MTP heads."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    # Patterns also match buffers that older checkpoints store and the model computes, such as rotary frequencies.
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    for name in _stored_names(path) if patterns else ():
        if any(pattern.search(name) for pattern in patterns) and name.rpartition(".")[2] not in computed:
            yield name


def _stored_names(path: str) -> Iterator[str]:
    if index := _file(path, "model.safetensors.index.json"):
        yield from json.loads(index.read_text())["weight_map"]
    elif file := _file(path, "model.safetensors"):
        with safe_open(file, "pt") as tensors:
            yield from tensors.keys()


def _integers(path: str, model: Any) -> Iterator[str]:
    """Yield the parameters that are stored as integers without a quantization_config."""
    if getattr(model.config, "quantization_config", None) is not None:
        return
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for file in _weight_files(path):
        with safe_open(file, "pt") as tensors:
            for name in parameters.intersection(tensors.keys()):
                if tensors.get_slice(name).get_dtype().startswith(("I", "U")):
                    yield name


def _weight_files(path: str) -> Iterator[Path]:
    names = {"model.safetensors"}
    if index := _file(path, "model.safetensors.index.json"):
        names = set(json.loads(index.read_text())["weight_map"].values())
    yield from filter(None, (_file(path, name) for name in names))


def _file(path: str, name: str) -> Path | None:
    """Return the local path of the model's file of that name, if there is one."""
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def check_configuration(path: str) -> None:
    """Read the configuration of the model at `path`.

    Raises:
        ModelFolderError: there is none, or it cannot be read.
    """
    with _reading(path, "configuration", ("config.json",)):
        AutoConfig.from_pretrained(path, trust_remote_code=False)


@contextmanager
def _reading(path: str, part: str, files: tuple[str, ...]) -> Iterator[None]:
    """Turn any exception of transformers, tokenizers and safetensors into one line that names a file and a remedy."""
    report = _LoadReport()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(report)
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        # No file is damaged: the remedy below would be wrong.
        raise
    except Exception as error:  # these libraries raise many types, also plain Exception
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if report.incomplete:
            reason = f"parts of {_some(report.incomplete)} are missing, or of other shapes"
        place = next(_damaged(path, files), path)
        raise ModelFolderError(
            f"{place}: no {part} can be loaded from there: {reason}: copy the file again "
            "from where the model comes from"
        ) from error
    finally:
        logger.removeFilter(report)


class _LoadReport(logging.Filter):
    """Removes transformers' table of tensors from the log, and collects the names that only this table contains."""

    def __init__(self) -> None:
        super().__init__()
        self.incomplete: list[str] = []
        """Tensors that are assembled from several stored ones, not all of which fit."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        self.incomplete += re.findall(r"^(\S+) *\| CONVERSION", text, re.MULTILINE)
        return " LOAD REPORT " not in text


def _damaged(path: str, files: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that cannot be read, then all of `files` that exist."""
    there = [file for name in files if (file := _file(path, name))]
    weights = sorted(Path(path).glob("*.safetensors")) if not files else []
    for file in there:
        try:
            assert isinstance(json.loads(file.read_text()), dict)
        except (OSError, ValueError, AssertionError):
            yield file
    for file in weights:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError):
            yield file
    yield from there


def _weights(path: str) -> Path | str:
    single = Path(path) / "model.safetensors"
    return single if single.is_file() else path


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (", ..." if len(listed) > _NAMED else "")
