"""Files uploaded to the hub; the upload itself is recorded at the last call before the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from april.commands.main import run as april
from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings
from april.config.settings.model_settings import ModelSettings
from april.tasks.task import TaskSpec


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    said: dict[str, Any] = {}

    def create_repo(api: Any, repo_id: str, private: bool, exist_ok: bool) -> str:
        said.update(name=repo_id, private=private)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(api: Any, repo_id: str, folder_path: Path, **patterns: Any) -> None:
        names = [path.name for path in folder_path.iterdir()]
        kept = huggingface_hub.utils.filter_repo_objects(names, **patterns)
        said["files"] = sorted(kept)

    def upload_file(api: Any, repo_id: str, path_or_fileobj: bytes, path_in_repo: str) -> None:
        said[path_in_repo] = path_or_fileobj.decode()

    for call in (create_repo, upload_folder, upload_file):
        monkeypatch.setattr(huggingface_hub.HfApi, call.__name__, call)
    return said


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    checkpoint = directory / "checkpoints" / "step-000002"
    (checkpoint / "training").mkdir(parents=True)
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "training/state.safetensors",
        "april.json",
        "manifest.json",
    ):
        (checkpoint / name).write_text("{}")
    (checkpoint / "config.json").write_text('{"tensors_left_out": ["mtp", "visual"]}')
    recipe = Recipe(
        model=ModelSettings(path="Qwen/Qwen3-4B"),
        task=TaskSpec("records", path=str(tmp_path / "my_data.jsonl"), answer_column="result"),
        algorithm=AlgorithmSettings(algorithm="dapo"),
    )
    (directory / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    stale = [(0.0, 0, 0.0), (1.0, 2, 0.5), (9.0, 9, 1.0)]
    lines: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.25, "accuracy": 0.125}]
    for step, (mean, most, off) in enumerate(stale, 1):
        lines.append({"step": step, "staleness_mean": mean, "staleness_max": most, "off_policy_token_share": off})
    lines.insert(3, {"step": 2, "eval_reward": 0.75, "accuracy": 0.5})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_newest_checkpoint_is_uploaded_with_a_model_card(
    run: Path, uploaded: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert april(["push", str(run), "me/qwen-dapo"]) == 0
    assert capsys.readouterr().out == "https://huggingface.co/me/qwen-dapo\n"
    assert (uploaded["name"], uploaded["private"]) == ("me/qwen-dapo", True)
    assert uploaded["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    card = uploaded["README.md"]
    assert huggingface_hub.ModelCard(card).data.base_model == "Qwen/Qwen3-4B"
    for line in (
        "# Qwen/Qwen3-4B, trained on my_data.jsonl",
        "2 steps of reinforcement learning with DAPO",
        "| held-out reward before | 0.250 |",
        "| held-out accuracy after | 0.500 |",
        "| staleness, mean, in weight updates | 0.50 |",
        "| staleness, largest | 2 |",
        "| tokens sampled by an older policy | 25.0 % |",
        '"answer_column": "result"',
        "Tensors of the base model that this model lacks: `mtp`, `visual`.",
    ):
        assert line in card
    assert str(run.parent) not in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "april push DIR OWNER/NAME"),
        (("{run}", "no-owner"), "owner/name"),
        (("{run}/nowhere", "me/x"), "no checkpoint yet"),
        (("{run}", "me/x", "--publik"), "april push DIR OWNER/NAME"),
    ],
)
def test_errors_are_one_line(
    run: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert april(["push", *(argument.format(run=run) for argument in arguments)]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
