"""A checkpoint of two ranks resumes bit for bit on any number of ranks, and in one process without ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april.training.checkpoint import ADAPTER
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from tests import tiny
from tests.ranks.checkpoints import fingerprint, policy
from tests.ranks.launch import run
from tests.ranks.updates import settings


@pytest.mark.parametrize("case", ["ppo", "reference", "lora"])
def test_a_checkpoint_resumes_bit_for_bit_with_a_different_number_of_ranks(case: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run("tests.ranks.checkpoints:save", 2, tmp_path, case=case, directory=str(saved))
    for world in (1, 3, 4):
        run("tests.ranks.checkpoints:load", world, tmp_path, case=case, directory=str(saved))
    alone = LocalLearner(policy(case, str(saved)), LearnerSettings.of(settings(case)))
    alone.load(saved)
    assert fingerprint(alone) == json.loads((saved / "fingerprint.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    merged = dict(alone.adapters.merged()) if alone.adapters else dict(alone.model.named_parameters())
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, merged[name].detach(), atol=1e-6 if case == "lora" else 0, rtol=0)

    there = tmp_path / "alone"
    there.mkdir()
    other = LocalLearner(policy(case, str(saved)), LearnerSettings.of(settings(case)), tiny.tokenizer())
    other.load(saved)
    other.save(there)
    assert (saved / ADAPTER).exists() == (case == "lora")
    if case == "lora":
        ours, own = (load_file(place / ADAPTER / "adapter_model.safetensors") for place in (saved, there))
        assert ours.keys() == own.keys()
        assert all(torch.equal(ours[name], own[name]) for name in own)
    (there / "fingerprint.json").write_text((saved / "fingerprint.json").read_text())
    run("tests.ranks.checkpoints:load", 3, tmp_path, case=case, directory=str(there))


DIVIDED = [
    ("model", (2, {"tensor": 2}), (3, {})),
    ("model", (4, {"tensor": 2}), (2, {"tensor": 2})),
    ("mixture", (2, {"expert": 2}), (2, {"tensor": 2, "expert": 2})),
    ("mixture", (4, {"tensor": 2, "expert": 4}), (2, {})),
    ("mixture", (4, {"expert": 2, "replicas": 2}), (4, {"tensor": 2, "expert": 2})),
]


@pytest.mark.parametrize(("kind", "before", "after"), DIVIDED)
def test_a_tensor_parallel_checkpoint_resumes_in_a_different_layout(
    kind: str, before: tuple[int, dict[str, int]], after: tuple[int, dict[str, int]], tmp_path: Path
) -> None:
    """And transformers loads it, under the names that it saves such a policy with itself."""
    saved, arguments = tmp_path / "saved", {"case": "grpo", "directory": str(tmp_path / "saved"), "kind": kind}
    run("tests.ranks.checkpoints:save", before[0], tmp_path, **before[1], **arguments)
    run("tests.ranks.checkpoints:load", after[0], tmp_path, **after[1], **arguments)
    alone = LocalLearner(policy("grpo", str(saved), kind), LearnerSettings.of(settings("grpo")))
    alone.load(saved)
    assert fingerprint(alone) == json.loads((saved / "fingerprint.json").read_text())
    alone.model.save_pretrained(tmp_path / "own")
    found, own = (load_file(path / "model.safetensors") for path in (saved, tmp_path / "own"))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
