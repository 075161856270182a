"""No code runs without the user's request, no data is executed, and no key is left in files."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import torch

from april.commands.arguments import override
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe, recipe_from_dict
from april.config.settings.engine_settings import API_KEY
from april.config.settings.model_settings import ModelSettings
from april.training.checkpoint import TRAINING, CheckpointError
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.policy import load_policy
from april.training.run_directory import lock_directory, prepare_output
from tests import forked, tiny

SOURCE = Path(__file__).parents[1] / "src" / "april"

CODE_FROM_DATA = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "yaml.load",
    "yaml.unsafe_load",
    "importlib.import_module",
    "os.system",
    "os.popen",
}
ALLOWED = {
    (
        "engines/connection.py",
        "pickle.loads",
    ): "what goes to and from processes that april started",
    (
        "engines/ray/node_requirements.py",
        "pickle.loads",
    ): "what the driver hands its own task on a node, as Ray does all else",
    ("environments/workers.py", "pickle.loads"): "what makes environments, in a worker process",
    ("rollout/user_code/workers.py", "pickle.loads"): "what goes to and from worker processes over pipes",
    ("tasks/isolation.py", "pickle.loads"): "the reward function, in a worker process",
    ("loading.py", "importlib.import_module"): "the dotted path of a reward function, an environment or tools",
}


TRUSTED = {
    "integrations/slime/dataset_images.py": "TRUSTED",  # slime has run the same code by then
    "integrations/slime/rollouts.py": "TRUSTED",  # slime has run the same code by then
    "integrations/stop_tokens.py": "TRUSTED",  # slime, SkyRL and OpenRLHF always run it, and have by then
    "integrations/trl/async_grpo.py": "args.trust_remote_code",  # TRL's setting, False by default
    "integrations/trl/colocate.py": "args.trust_remote_code",  # TRL's setting, False by default
}
"""What decides there whether code that a model brings is run."""


def calls(file: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(file.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_data_becomes_code(file: Path) -> None:
    for name, call in calls(file):
        where = f"{file}:{call.lineno}"
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name not in CODE_FROM_DATA or (str(file.relative_to(SOURCE)), name) in ALLOWED, where
        assert name != "torch.load" or arguments.get("weights_only") == "True", where
        assert arguments.get("allow_pickle", "False") == "False", where
        trusted = TRUSTED.get(str(file.relative_to(SOURCE)), "False")
        assert arguments.get("trust_remote_code", "False") in ("False", trusted), where
        assert arguments.get("shell", "False") == "False", where
        if name.endswith(".from_pretrained"):
            assert "trust_remote_code" in arguments, f"{where}: say so, or transformers asks"


def test_code_that_a_model_brings_is_not_run(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model")
    proof = tmp_path / "ran"
    (model / "theirs.py").write_text(f"open({str(proof)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    }
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(ModelSettings(path=str(model)))
    assert not proof.exists()


class Poison:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.proof,)


def test_an_untrusted_checkpoint_executes_no_code(tmp_path: Path) -> None:
    proof, state = tmp_path / "ran", tmp_path / TRAINING / "state.safetensors"
    state.parent.mkdir()
    torch.save({"random": Poison(proof)}, tmp_path / "poison")
    state.write_bytes((tmp_path / "poison").read_bytes())
    with pytest.raises(CheckpointError, match="cannot be read"):
        LocalLearner(tiny.model(), LearnerSettings.of(Recipe())).load(tmp_path)
    assert not proof.exists()
    torch.load(tmp_path / "poison", weights_only=False)
    assert proof.exists(), "the poison works"


def test_a_run_does_not_write_into_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files, and no run"):
        prepare_output(tmp_path, "rename")
    with pytest.raises(ConfigError, match="this is a file"):
        prepare_output(tmp_path / "authorized_keys", "error")
    assert [path.name for path in tmp_path.iterdir()] == ["authorized_keys"]
    prepare_output(tmp_path / "new", "error")
    (tmp_path / "empty").mkdir()
    prepare_output(tmp_path / "empty", "error")
    (tmp_path / "failed-early").mkdir()
    with lock_directory(tmp_path / "failed-early"):
        pass
    prepare_output(tmp_path / "failed-early", "error")


RECIPE = """
[model]
path = "policy"
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 2
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 4
n_samples_per_prompt = 2
max_response_length = 16
stop_token_ids = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
[engine]
max_num_seqs = 8
context_length = 128
[algorithm]
kl_coef = 0.0
[training]
steps = 2
eval_samples = 1
threads = 1
[reporting]
output = "run"
"""


ENVIRONMENT = """
[environment]
path = "world.py:World"
workers = 0
max_turns = 1
[environment.params]
api_key = "sk-sentinel-literal"
url = "http://host/v1?token=sk-sentinel-query"
headers = { Authorization = "Bearer ${MY_PASSWORD}" }
"""
WORLD = """
class World:
    def __init__(self, api_key, url, headers):
        assert (api_key, url) == ("sk-sentinel-literal", "http://host/v1?token=sk-sentinel-query")
        self.headers = headers

    def reset(self, prompt, seed):
        return "Say it."

    def step(self, turn):
        assert self.headers == {"Authorization": "Bearer sk-sentinel-MY_PASSWORD"}
        raise ValueError(f"401 for {self.headers}")
"""
"""An environment with every kind of key, that lets one out."""


def test_a_run_writes_no_key_and_nothing_outside_its_directory(tmp_path: Path) -> None:
    tiny.save(tmp_path / "policy")
    (tmp_path / "recipe.toml").write_text(RECIPE + ENVIRONMENT)
    (tmp_path / "world.py").write_text(WORLD)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    keys = {name: f"sk-sentinel-{name}" for name in (API_KEY, "WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD")}
    environment = {**os.environ, **keys, "PYTHONDONTWRITEBYTECODE": "1"}
    done = forked.run("train", "recipe.toml", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert written
    assert all(path.is_relative_to(tmp_path / "run") for path in written)
    assert b"401 for" in (tmp_path / "run" / "faults.jsonl").read_bytes()
    assert "environment.params.api_key, environment.params.url: secrets are written nowhere" in done.stdout
    printed = (done.stdout + done.stderr).encode()
    for name, content in [("output", printed), *((str(path), path.read_bytes()) for path in written)]:
        assert b"sk-sentinel" not in content, name


def test_a_secret_missing_at_resume_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe()
    recipe.environment.path = "world.py:World"
    recipe.environment.params = {"api_key": "sk-1", "url": "http://${HOST}"}
    with pytest.raises(ConfigError, match=r"environment.params refers to .{HOST}: set the environment variable HOST"):
        check_recipe(recipe)
    resumed = recipe_from_dict(recipe.redacted())
    with pytest.raises(ConfigError, match=r"environment.params.api_key = '\*\*\*': a secret, which was not kept"):
        check_recipe(resumed)
    monkeypatch.setenv("HOST", "h")
    flags = ["--environment.params", "api_key", "${MY_KEY}", "url", "x"]
    changed = override(resumed, flags, "april resume", "")
    assert changed.environment.params == {"api_key": "${MY_KEY}", "url": "x"}
