"""Two ranks that train what a real server generates, and send it their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.reporting.metrics_log import read_metrics
from tests.limits import HANG
from tests.ranks.runs import april, recipe_in
from tests.servers.conftest import VLLM, environment, python_of
from tests.servers.tiny import tiny_model


@pytest.mark.parametrize("way", ["broadcast", "disk", "adapters"])
def test_a_server_gets_the_weights_of_the_ranks(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its log-probabilities would not be those that the ranks compute, after updates this large."""
    tiny_model(tmp_path / "policy", seed=0)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{"ab" * n}", "answer": "a"}}\n' for n in range(1, 11)))
    for name, value in environment(0).items():
        monkeypatch.setenv(name, value)
    recipe = recipe_in(tmp_path, "run")
    flags = ["--engine", "vllm", "--server-python", str(python_of("vllm")), "--weight-transfer", way]
    flags += ["--lora.rank", "4", "--learning-rate", "0.03"] if way == "adapters" else []
    text = recipe.read_text().replace("[engine]\n", f"[engine]\nserver_args = {VLLM}\n")
    recipe.write_text(text)
    said, _ = (run := april("train", recipe, *flags)).communicate(timeout=HANG)
    assert run.returncode == 0, said
    steps = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["policy_version"] for row in steps] == [0, 1, 2, 3]
    fresh = [row["by_age/age_0/kl"] for row in steps]
    older = [row["by_age/age_1/kl_k3"] for row in steps[1:]]
    assert max(map(abs, fresh)) < 1e-5, fresh
    assert min(older) > 1e-3, "no update changed what tokens are drawn from: the test saw nothing"
