"""slime from its own source, with arguments from its own parsers, and plug-ins that test what april gives them.

APRIL_SLIME_SOURCE names a checkout of slime 0.3.1; the interpreter has to have what that imports (its requirements.txt,
and SGLang).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import requests

SOURCE = os.environ.get("APRIL_SLIME_SOURCE")


def need_slime() -> Path:
    """slime's source, on the path; skips the tests of a module where there is none."""
    if not SOURCE:
        pytest.skip("slime is tested from its source: set APRIL_SLIME_SOURCE to a checkout", allow_module_level=True)
    if SOURCE not in sys.path:
        sys.path.insert(0, SOURCE)
    try:
        importlib.import_module("slime.ray.rollout")
    except ImportError as error:
        pytest.skip(f"this interpreter lacks what slime imports: {error}", allow_module_level=True)
    return Path(SOURCE)


def slime_arguments(*flags: str, **megatron: Any) -> argparse.Namespace:
    """What slime's programs make of these flags. Megatron-LM's own arguments alone, which need its source, are given
    here by hand, in `megatron`."""
    from slime.backends.sglang_utils.arguments import sglang_parse_args, validate_args
    from slime.utils.arguments import get_slime_extra_args_provider, slime_validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False)
    args, _ = get_slime_extra_args_provider()(parser).parse_known_args(list(flags))
    with mock.patch.object(sys, "argv", ["train.py", *flags]):
        servers = sglang_parse_args()
    megatron = {"save": None, "load": None, "seed": 0, "fp16": False, **megatron}
    modes = {"debug_rollout_only": True, "debug_train_only": False, "load_debug_rollout_data": None}
    for name, value in {**vars(servers), **modes, **megatron}.items():
        setattr(args, name, value)
    slime_validate_args(args)
    validate_args(args)
    # slime resumes only from Megatron's checkpoints, and there is none here.
    args.debug_rollout_only, args.load = False, megatron["load"]
    return args


def prompt_file(path: Path, count: int) -> Path:
    """`count` prompts whose labels name them."""
    rows = ({"input": f"prompt {i} of many: ", "label": str(i), "metadata": {"row": i}} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_weights(url: str, model: Path, label: int) -> None:
    """The request to a server when slime updates weights from disk."""
    body = {"model_path": str(model), "weight_version": str(label), "flush_cache": True}
    requests.post(f"{url}/update_weights_from_disk", json=body).raise_for_status()


async def length_parity(args: argparse.Namespace, sample: Any) -> float:
    """A custom reward model. It fails if the sample's prompt, label, metadata, text or tokens are not its own."""
    from slime.utils.processing_utils import load_tokenizer

    tokenizer = load_tokenizer(args.hf_checkpoint)
    assert sample.prompt == f"prompt {sample.label} of many: "
    assert sample.metadata["row"] == int(sample.label)
    assert sample.reward is None
    prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
    assert sample.tokens[: len(prompt)] == prompt
    response = sample.tokens[len(prompt) :]
    assert len(response) == sample.response_length == len(sample.rollout_log_probs) == len(sample.loss_mask)
    assert tokenizer.decode(response, skip_special_tokens=args.rollout_skip_special_tokens) == sample.response
    return float(sample.response_length % 2)


async def group_lengths(args: argparse.Namespace, samples: list[Any]) -> list[dict[str, float]]:
    """A custom reward model of groups, with rewards of several parts."""
    assert len({sample.prompt for sample in samples}) == 1
    return [{"parity": await length_parity(args, s), "length": float(s.response_length)} for s in samples]


async def teacher(args: argparse.Namespace, sample: Any) -> dict[str, Any]:
    """A custom reward model whose answer is no number."""
    return {"logprobs": np.array([-0.5, -0.25])}


async def unsaveable(args: argparse.Namespace, sample: Any) -> dict[str, Any]:
    return {"kinds": {"a set"}}


def note_length(args: argparse.Namespace, sample: Any, *, evaluation: bool) -> None:
    """A sample hook."""
    assert not evaluation
    sample.metadata["hooked"] = sample.response_length


def contract_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """april's rollout function for slime's contract tests, which call it without arguments: the file that
    APRIL_SLIME_CONTRACT names contains the arguments of a real run, whose servers are running."""
    import pickle

    from slime.utils.http_utils import init_http_client

    from april.integrations.slime import rollout

    assert args is None
    args = pickle.loads(Path(os.environ["APRIL_SLIME_CONTRACT"]).read_bytes())
    init_http_client(args)
    return rollout(args, rollout_id, data_source, evaluation=evaluation)
