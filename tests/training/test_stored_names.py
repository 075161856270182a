"""Names and bytes of files and transfers, against what transformers saves itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from april.config.recipe import Recipe
from april.config.settings.engine_settings import EngineSettings
from april.engines.cuda_ipc import exports_of
from april.engines.weight_transfer import InProcess
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.offload import Part
from april.training.policy import save_policy
from april.training.stored_names import cut, stored_parts, stored_sources
from april.training.weight_transfer import model_transfer
from tests import tiny
from tests.engines.ipc_files import SharedFiles
from tests.engines.test_cuda_ipc import read

CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS},
    "minimax_m2": {"num_local_experts": 4, **EXPERTS},
}


def model(kind: str) -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "qwen3"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **heads, **tokens, **MODELS[kind]))
    for name, buffer in made.named_buffers():
        if "bias" in name:
            buffer.uniform_(30, 40)  # values that bfloat16 would round
    return made


def saved(made: Any, directory: Path) -> dict[str, Tensor]:
    made.save_pretrained(directory)
    return dict(load_file(directory / "model.safetensors"))


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", MODELS)
def test_files_and_every_transfer_have_the_tensors_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    made = model(kind)
    expected = saved(made, tmp_path / "own")
    parts = stored_parts(made)
    require_equal(dict(cut(((name, make()) for name, make in stored_sources(made).items()), parts)), expected)
    save_policy(tmp_path / "written", made, tiny.tokenizer())
    require_equal(dict(load_file(tmp_path / "written" / "model.safetensors")), expected)
    transfer = model_transfer(EngineSettings(engine="vllm-inproc"), made, None, tmp_path)
    assert isinstance(transfer, InProcess)
    require_equal(dict(transfer.offer(1)), expected)
    shared, found = SharedFiles(tmp_path), dict[str, Tensor]()
    for exported in exports_of(lambda: iter(transfer.offer(1)), CPU, 1000, shared):
        found |= read(exported, shared.uuid)
    require_equal(found, expected)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    require_equal(dict(restored.state_dict()), dict(made.state_dict()))


def test_a_checkpoint_from_host_memory_makes_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that is made while a checkpoint is written is one of the policy's."""
    learner = LocalLearner(tiny.model(), LearnerSettings.of(Recipe()), tiny.tokenizer(), tmp_path)
    learner.to_host({Part.PARAMETERS})
    clones: list[int] = []
    clone = torch.Tensor.clone

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        clones.append(tensor.nbytes)
        return clone(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    learner.save_policy(tmp_path / "saved")
    assert not clones
    learner.to_device()
    require_equal(dict(load_file(tmp_path / "saved" / "model.safetensors")), saved(learner.model, tmp_path / "own"))
