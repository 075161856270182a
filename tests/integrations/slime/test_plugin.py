"""slime's plug-ins without a server: refused settings, and slime's own contract tests."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.integrations.slime.source import need_slime, prompt_file, slime_arguments

SOURCE = need_slime()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay  # noqa: E402
from slime.rollout.data_source import DataSource as SlimeDataSource  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from april import FinishReason, Group, SamplingParams  # noqa: E402
from april.disk import as_json  # noqa: E402
from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime.rollouts import FORMAT, Batch, SlimeRollouts  # noqa: E402
from april.integrations.slime.samples import mark_unfinished, scored  # noqa: E402
from april.rollout.trajectory.routes import RouteRows  # noqa: E402
from tests import tiny  # noqa: E402
from tests.mixtures import mixture  # noqa: E402


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


def test_the_data_source_extends_slimes_with_a_checkpoint(args: Namespace) -> None:
    source = plugin.DataSource(args)
    assert isinstance(source, SlimeDataSource)
    first = source.get_samples(3)
    source.save(0)
    again = plugin.DataSource(args)
    again.load(0)
    assert [s.index for group in again.get_samples(1) for s in group] == [6, 7]
    assert [group[0].prompt for group in first] == [f"prompt {i} of many: " for i in range(3)]


def test_a_returned_group_is_restarted(args: Namespace) -> None:
    source = plugin.DataSource(args)
    (group,) = source.get_samples(1)
    group[0].status = Sample.Status.ABORTED
    source.add_samples([group])
    assert source.get_samples(2)[0] is group


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("rollout_stop", ["###", ""], "'': a stop string is a text of at least one character"),
        ("multimodal_keys", {"image": "image", "audio": "sound"}, "videos and audio are not sent"),
        ("buffer_filter_path", "slime.rollout.data_source.pop_first", "the buffer is april's"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_at_the_start(
    args: Namespace, setting: str, value: object, remedy: str
) -> None:
    setattr(args, setting, value)
    with pytest.raises(ValueError, match=f"--{setting.replace('_', '-')}.*{remedy}"):
        plugin.DataSource(args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"april_max_stalenes": 3},
            r"april_max_stalenes \(--custom-config-path\): april has no such setting, only april_over",
        ),
        ({"april_max_staleness": "three"}, r"april_max_staleness \(--custom-config-path\) = three: give a number"),
        (
            {"april_over_sampling_batch_size": "many"},
            r"april_over_sampling_batch_size \(--custom-config-path\) = many: give a number, or auto",
        ),
        (
            {"april_over_sampling_batch_size": 1},
            r"april_over_sampling_batch_size \(--custom-config-path\) = 1 is less than --rollout-batch-size = 2",
        ),
        (
            {"over_sampling_batch_size": 5, "april_max_staleness": 1},
            r"--over-sampling-batch-size = 5 cannot keep april_max_staleness \(--custom-config-path\) = 1: with --",
        ),
    ],
)
def test_a_setting_of_aprils_that_cannot_be_is_refused_at_the_start(
    args: Namespace, settings: dict[str, object], message: str
) -> None:
    for name, value in {"partial_rollout": True, **settings}.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        plugin.DataSource(args)


@pytest.mark.parametrize(("support_sets", "top_p"), [(None, 0.9), ({}, 1.0)])
def test_a_checkpoints_support_sets_must_match_top_p(
    args: Namespace, support_sets: dict[str, object] | None, top_p: float
) -> None:
    args.rollout_top_p = top_p
    saved = {"format": FORMAT, "ahead": None, "support_sets": support_sets}
    with pytest.raises(ValueError, match=f"--rollout-top-p {top_p}: the unfinished samples .* set it as it was"):
        SlimeRollouts(args, plugin.DataSource(args), saved)


def test_a_setting_for_evaluation_only_gives_a_warning(args: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    plugin.DataSource(args)
    assert "is ignored" not in caplog.text
    args.sglang_server_concurrency, args.use_distributed_post = 64, True
    plugin.DataSource(args)
    assert re.search(r"--sglang-server-concurrency \d+ is ignored: .* evaluation only", caplog.text)
    assert re.search(r"--use-distributed-post True is ignored: .* evaluation only", caplog.text)


def finished_group(rollouts: SlimeRollouts) -> Group:
    """A group of a prompt of theirs, whose sample has ended."""
    group = Group.start(0, next(rollouts.prompts()), 1, SamplingParams(max_tokens=2), seed=0)
    group.samples[0].extend((5, 6), (-1.0, -2.0), 0, FinishReason.STOP)
    return group


async def rewarded(rollouts: SlimeRollouts) -> Group:
    """The same, scored, and restored from a checkpoint."""
    group = finished_group(rollouts)
    (sample,) = group.samples
    reward = await rollouts.score(group.prompt, sample)
    sample.reward, sample.reward_info = reward.value, reward.info
    return Group.from_dict(json.loads(as_json(group.to_dict())))


async def test_a_structured_reward_is_passed_to_slime_and_saved(args: Namespace) -> None:
    """As a teacher's answer in on-policy distillation, of which slime makes a number after the rollout."""
    args.custom_rm_path = "tests.integrations.slime.source.teacher"
    group = await rewarded(SlimeRollouts(args, plugin.DataSource(args)))
    (theirs,) = scored(group)
    assert group.samples[0].reward == 0
    assert theirs.reward == {"logprobs": [-0.5, -0.25]}


async def test_results_of_hooks_and_reward_models_are_saved_with_their_sample(args: Namespace) -> None:
    args.custom_rm_path = "tests.integrations.slime.source.length_parity"
    args.rollout_sample_hook_path = ["tests.integrations.slime.source.note_length"]
    group = await rewarded(rollouts := SlimeRollouts(args, plugin.DataSource(args)))
    (theirs,) = scored(group)
    assert theirs.tokens == [*group.prompt.token_ids, 5, 6]
    assert theirs.response == rollouts.tokenizer.decode([5, 6])
    assert (theirs.rollout_log_probs, theirs.loss_mask, theirs.label) == ([-1.0, -2.0], [1, 1], "0")
    assert (theirs.reward, theirs.metadata) == (0.0, {"row": 0, "hooked": 2})
    assert set(group.samples[0].reward_info["slime"]) == {"reward", "metadata", "response"}, "not tokens once more"


async def test_slimes_trainer_gets_the_routes_of_the_versions_that_drew_the_tokens(
    args: Namespace, tmp_path: Path
) -> None:
    """After an interrupt, a checkpoint of slime's data source, and a weight update."""
    mixture("Glm4Moe").save_pretrained(tmp_path / "mixture")
    tiny.tokenizer().save_pretrained(tmp_path / "mixture")
    args.hf_checkpoint, args.use_rollout_routing_replay = str(tmp_path / "mixture"), True
    args.num_layers, args.moe_router_topk, args.moe_layer_freq = 3, 2, [0, 1, 1]
    source = plugin.DataSource(args)
    rollouts = source.rollouts = SlimeRollouts(args, source)

    def rows(start: int, end: int, version: int) -> RouteRows:
        experts = (np.arange(start, end)[:, None, None] + np.arange(2)[:, None] + np.arange(2) + 3 * version) % 8
        return RouteRows(start, experts.astype(np.uint8))

    group = Group.start(0, next(rollouts.prompts()), 1, SamplingParams(max_tokens=4), seed=0)
    (sample,), prompt = group.samples, len(group.samples[0].prompt_ids)
    sample.extend((5, 6), (-1.0, -2.0), 0)
    sample.route(rows(0, prompt + 1, 0), 0, latest=False)
    rollouts._batch = Batch(1, 0, [group])  # of a later rollout than the checkpoint's: it is saved whole
    rollouts._saved = {"format": FORMAT, "support_sets": None}
    source.save(0)
    again = plugin.DataSource(args)
    again.load(0)
    assert again.rollouts is not None
    rollouts, (group,) = again.rollouts, again.rollouts._batch.groups
    (sample,) = group.samples
    sample.extend((7, 8), (-1.0, -2.0), 1, FinishReason.LENGTH)
    sample.route(rows(0, prompt + 3, 1), 1, latest=False)
    sample.reward, sample.reward_info = 0.0, {"slime": {}}
    (theirs,) = rollouts._hand_over(group, 1)
    expected = np.concatenate((rows(0, prompt + 1, 0).experts, rows(prompt + 1, prompt + 3, 1).experts))
    experts = theirs.rollout_routed_experts
    assert (experts.dtype, tuple(experts.shape)) == (torch.int32, (len(theirs.tokens) - 1, 3, 2))
    assert experts[:, 1:].tolist() == expected.tolist()
    validate_rollout_routed_experts_for_replay([experts], args)


async def test_a_sample_contains_the_number_of_its_first_rollout(args: Namespace) -> None:
    args.custom_rm_path = "tests.integrations.slime.source.length_parity"
    rollouts = SlimeRollouts(args, plugin.DataSource(args))
    group = Group.start(0, next(rollouts.prompts()), 2, SamplingParams(max_tokens=2), seed=0)
    group.samples[0].extend((5,), (-1.0,), 0)
    mark_unfinished(group, 3)
    group = Group.from_dict(json.loads(as_json(group.to_dict())))
    mark_unfinished(group, 4)
    for sample in group.samples:
        sample.extend((6,), (-1.0,), 0, FinishReason.STOP)
        reward = await rollouts.score(group.prompt, sample)
        sample.reward, sample.reward_info = reward.value, reward.info
    begun, fresh = scored(Group.from_dict(json.loads(as_json(group.to_dict()))))
    assert begun.metadata["start_rollout_id"] == 3
    assert "start_rollout_id" not in fresh.metadata


async def test_a_reward_that_no_checkpoint_could_hold_fails_at_once(args: Namespace) -> None:
    args.custom_rm_path = "tests.integrations.slime.source.unsaveable"
    rollouts = SlimeRollouts(args, plugin.DataSource(args))
    group = finished_group(rollouts)
    with pytest.raises(TypeError, match="a set cannot be part of a checkpoint"):
        await rollouts.score(group.prompt, group.samples[0])


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


def test_an_incompatible_slime_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    done = run_python("import april.integrations.slime", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: april's integration was written for slime 0.3.1")
    assert "slime.rollout" in last
