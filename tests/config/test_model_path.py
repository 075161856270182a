"""A model path that can be nothing is refused from its spelling and the disk, before the hub is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.config.model_path import model_path_problem
from tests import tiny


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "models" / "policy")
    (tmp_path / "warm-start").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "path", ["models/policy", "./models/policy", "Qwen/Qwen3-4B", "gpt2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"]
)
def test_a_directory_or_a_hub_name(path: str) -> None:
    assert model_path_problem(path) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "model.path is not set"),
        ("./policy", "no such directory"),
        ("~/nowhere/at/all", "no such directory"),
        ("runs/gcd/checkpoints", "no such directory"),
        ("models/polcy", "no such directory; did you mean models/policy?"),
        ("models/other", "no such directory"),
        ("warm_start", "no such directory; did you mean ./warm-start?"),
        ("warm-start", "there is no config.json in this directory"),
        ("a b", "nor a hub name"),
        ("Qwen/", "nor a hub name"),
        ("-x", "nor a hub name"),
        ("x--y", "nor a hub name"),
        ("x" * 97, "nor a hub name"),
        ("x" * 5000, "nor a hub name"),
        ("\0", "nor a hub name"),
    ],
)
def test_invalid_model_paths_are_refused(path: str, message: str) -> None:
    problem = model_path_problem(path)
    assert problem is not None
    assert message in problem


def test_the_error_of_a_missing_tokenizer_names_its_source(here: Path) -> None:
    for file in (here / "models" / "policy").glob("*token*"):
        file.unlink()
    problem = model_path_problem("models/policy")
    assert problem is not None
    assert "this directory has a model but no tokenizer" in problem
