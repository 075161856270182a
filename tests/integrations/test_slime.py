"""slime's plug-ins without a server: what they refuse, and slime's own tests of them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.integrations.slime_source import need_slime, prompt_file, slime_arguments

SOURCE = need_slime()

from slime.rollout.data_source import DataSource as SlimeDataSource  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from april.integrations import slime as plugin  # noqa: E402
from tests import tiny  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def args(model: Path, tmp_path: Path) -> Namespace:
    data = prompt_file(tmp_path / "prompts.jsonl", 10)
    return slime_arguments(
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label", "--num-rollout", "3"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-num-gpus", "1"),
        save=str(tmp_path / "checkpoint"),
        load=str(tmp_path / "checkpoint"),
    )


def test_the_data_source_is_slimes_with_its_own_checkpoint(args: Namespace) -> None:
    source = plugin.DataSource(args)
    assert isinstance(source, SlimeDataSource)
    first = source.get_samples(3)
    source.save(0)
    again = plugin.DataSource(args)
    again.load(0)
    assert [s.index for group in again.get_samples(1) for s in group] == [6, 7]
    assert [group[0].prompt for group in first] == [f"prompt {i} of many: " for i in range(3)]


def test_a_group_put_back_is_begun_again(args: Namespace) -> None:
    source = plugin.DataSource(args)
    (group,) = source.get_samples(1)
    group[0].status = Sample.Status.ABORTED
    source.add_samples([group])
    assert source.get_samples(2)[0] is group


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("rollout_top_p", 0.9, "set it to 1"),
        ("rollout_stop", ["###"], "--rollout-stop-token-ids"),
        ("custom_generate_function_path", "my.generate", "one turn a sample"),
        ("use_rollout_routing_replay", True, "routed experts"),
        ("multimodal_keys", {"image": "image"}, "text"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_at_the_start(
    args: Namespace, setting: str, value: object, remedy: str
) -> None:
    setattr(args, setting, value)
    with pytest.raises(ValueError, match=f"--{setting.replace('_', '-')}.*{remedy}"):
        plugin.DataSource(args)


# slime's contract tests put stubs for modules that are not imported yet; here they are, so they run on the real ones.
REAL = "import ray, sglang_router, transformers"


def run_python(script: str, cwd: Path = SOURCE, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=cwd)


def test_the_data_source_passes_slimes_contract_tests() -> None:
    contract = SOURCE / "tests" / "plugin_contracts" / "test_plugin_path_loading_contracts.py"
    done = run_python(
        f"{REAL}, pytest; raise SystemExit(pytest.main(['-q', '{contract}']))",
        SLIME_CONTRACT_DATA_SOURCE_PATH="april.integrations.slime.DataSource",
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rollout_functions_signature_is_slimes() -> None:
    from slime.rollout.sglang_rollout import generate_rollout

    assert inspect.signature(plugin.rollout).parameters.keys() == inspect.signature(generate_rollout).parameters.keys()
    assert inspect.signature(plugin.rollout).parameters["evaluation"].default is False


def test_a_slime_that_lacks_what_april_needs_gives_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    done = run_python("import april.integrations.slime", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: april's integration was written for slime 0.3.1")
    assert "slime.rollout" in last
