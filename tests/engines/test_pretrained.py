"""A model's folder is read whole, or refused in one line that names a file, tensors and a remedy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from april.config.error import ConfigError
from april.config.settings.model_settings import ModelSettings
from april.engines.pretrained import load_model
from april.training.policy import load_policy, save_policy, stop_tokens
from tests import tiny

UP = "model.layers.1.mlp.up_proj.weight"
Edit = Callable[[dict[str, Tensor]], object]


def edited(folder: Path, edit: Edit) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, checkpoint: Path | None = None) -> tuple[Any, Any]:
    return load_policy(ModelSettings(path=str(folder), device="cpu"), checkpoint)


def refusal(folder: Path, checkpoint: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, checkpoint)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = edited(tiny.save(tmp_path), lambda tensors: tensors.pop(UP))
    message = refusal(folder)
    assert message.startswith(f"model.path = {str(folder)!r}: {folder / 'model.safetensors'}: 1 tensors of ")
    assert f"are missing, {UP}: training would start from random values; copy all files" in message


def test_a_missing_head_is_an_error_unless_it_is_tied(tmp_path: Path) -> None:
    load(edited(tiny.save(tmp_path / "tied"), lambda tensors: tensors.pop("lm_head.weight", None)))
    untied = tiny.save(tmp_path / "untied", tie_word_embeddings=False)
    assert "lm_head.weight: training" in refusal(edited(untied, lambda tensors: tensors.pop("lm_head.weight")))


def test_a_missing_matrix_of_one_expert_is_an_error(tmp_path: Path) -> None:
    """Files name the matrices of each expert, and transformers computes with tensors of all experts."""
    tiny.mixture().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    message = refusal(edited(tmp_path, lambda tensors: tensors.pop(name)))
    assert ": parts of model.layers.0.mlp.experts.gate_up_proj are missing" in message


def test_tensors_of_other_shapes_are_named(tmp_path: Path) -> None:
    folder = edited(tiny.save(tmp_path), lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    message = refusal(folder)
    assert "1 tensors have other shapes than config.json gives them, model.norm.weight is [3], not [32]: " in message


def test_a_checkpoint_is_refused_by_its_own_name(tmp_path: Path) -> None:
    checkpoint = edited(tiny.save(tmp_path / "step-000001"), lambda tensors: tensors.pop(UP))
    assert refusal(tiny.save(tmp_path / "policy"), checkpoint).startswith(f"{checkpoint / 'model.safetensors'}: 1 ")


def test_tensors_without_a_place_are_listed_once_and_exports_name_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = dict.fromkeys(("visual.blocks.0.weight", "visual.blocks.1.weight", "model.layers.2.mlp.up_proj.weight"))
    edited(tiny.save(tmp_path / "a"), lambda t: t.update({name: torch.zeros(2) for name in extra}))
    with caplog.at_level(logging.WARNING, "april"):
        model, tokenizer = load(tmp_path / "a")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'a'}: Qwen3ForCausalLM has no place for the tensors model.layers.2, visual: they are not "
        "trained, and checkpoints lack them"
    ]
    save_policy(tmp_path / "b", model, tokenizer)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tensors_left_out"] == ["model.layers.2", "visual"]
    caplog.clear()
    load(tmp_path / "b")
    assert not caplog.records


def test_heads_that_an_architecture_skips_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' report leaves out tensors that a class ignores, such as the MTP heads of Qwen3-Next."""
    model = tiny.model()
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"^mtp.*", r"inv_freq"])
    added = {"mtp.fc.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    folder = edited(tiny.save(tmp_path), lambda tensors: tensors.update(added))
    assert load_model(str(folder), torch.float32).config.tensors_left_out == ["mtp"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", lambda path: path.write_bytes(b"")),
        ("tokenizer.json", lambda path: path.write_text("{}")),
        ("tokenizer.json", lambda path: path.write_text('{"version": "1.0", "model": {"type": "BPE"')),
        ("tokenizer_config.json", lambda path: path.write_text("[")),
        ("generation_config.json", lambda path: path.write_text("{")),
        ("generation_config.json", lambda path: path.write_text("[]")),
        ("config.json", lambda path: path.write_text("{")),
        ("config.json", lambda path: path.write_text("[]")),
        ("config.json", lambda path: path.write_text('{"model_type": "qwen3", "hidden_size": "wide"}')),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, damage: Callable[[Path], object]) -> None:
    damage(tiny.save(tmp_path) / file)
    message = refusal(tmp_path)
    assert message.startswith(f"model.path = {str(tmp_path)!r}: {tmp_path / file}: no "), message
    assert message.endswith("copy the file again from where the model comes from")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tiny.save(tmp_path) / "model.safetensors").unlink()
    assert f"{tmp_path}: no causal LM can be loaded from there: " in refusal(tmp_path)


@pytest.mark.parametrize("eos", ['"x"', "[1, null]", "1.5", "1e9", "true"])
def test_stop_tokens_that_are_no_tokens_are_refused(tmp_path: Path, eos: str) -> None:
    (tiny.save(tmp_path) / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    model, tokenizer = load(tmp_path)
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id = .* is no token"):
        stop_tokens(model, tokenizer)


def test_weights_stored_as_integers_are_refused(tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[UP] = tensors[UP].mul(10).to(torch.int8)

    message = refusal(edited(tiny.save(tmp_path / "policy"), quantize))
    assert f"1 tensors are stored as integers, {UP}, and config.json has no quantization_config" in message
