"""Episodes with images in later turns on real servers: the tokens have the log-probabilities of the trainer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests import vision
from tests.forked import run as april
from tests.servers.conftest import SGLANG, VLLM, environment, python_of
from tests.training.test_image_episode_runs import KINDS, steps_of, write_recipe

ARGUMENTS = {"vllm": VLLM, "sglang": SGLANG}


@pytest.fixture(params=itertools.product(ARGUMENTS, KINDS), ids="-".join)
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment(0).items():
        monkeypatch.setenv(name, value)
    server, kind = request.param
    # SGLang takes placeholders that a policy draws for images of the next turn.
    vision.save_for_servers(tmp_path / "policy", "Qwen3VL", draws_media=server == "vllm")
    path = write_recipe(tmp_path, kind)
    engine = {"engine": server, "server_python": str(python_of(server)), "server_args": ARGUMENTS[server]}
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in engine.items())
    text = path.read_text().replace("prefill_chunk = 16\n", settings)
    text = text.replace("over_sampling_batch_size = 4", "over_sampling_batch_size = 2")
    path.write_text(text.replace("max_staleness = 2", "max_staleness = 0"))
    return path


def test_episodes_on_a_server_are_exact(recipe: Path, tmp_path: Path) -> None:
    """All tokens are fresh and have the ratio 1 to the policy that sampled them, in turns behind images too."""
    done = april("train", recipe, "--steps", 2)
    assert done.returncode == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    assert len(lines) == 2
    assert max(line["kl_behaviour"] for line in lines) < 1e-6
    assert all(line["environment_failures"] == 0 for line in lines)
    assert all(line["turns_mean"] > 1 for line in lines)
    assert len(list((tmp_path / "run" / "images").iterdir())) > 2
