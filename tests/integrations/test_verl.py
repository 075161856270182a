"""april in verl, with verl's real trainer loop, replay buffer, TransferQueue and workers; see `verl_trainer.py`.

scripts/setup_verl.sh makes an environment for it; run this file with that environment's Python.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transfer_queue", reason="verl is not installed here: scripts/setup_verl.sh")
pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")

import pandas
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.import_utils import load_class_from_fqn

from april.integrations import verl as plugin
from tests import tiny
from tests.integrations.verl_trainer import TEMPLATE, TinyTrainer, config_of, policy_of
from tests.integrations.verl_training import SETTINGS, TrainingTrainer

N, G = 3, 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    # Ray would start a process for each CPU it is told of.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # With as few CPUs as this machine has, actors would wait for one another for ever.
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(address="local", num_cpus=32, include_dashboard=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save(tmp_path_factory.mktemp("model"))
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "data_source": "tests",
            "prompt": [{"role": "user", "content": f"prompt {i} of many: "}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(40)
    ]
    path = tmp_path_factory.mktemp("data") / "prompts.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


@pytest.fixture
def config(model: Path, data: Path, tmp_path: Path) -> DictConfig:
    return config_of(model, data, tmp_path / "checkpoints")


def train(config: DictConfig, kind: type[TinyTrainer] = TinyTrainer) -> Any:
    """What verl's task runner does."""
    OmegaConf.resolve(config)
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    try:
        trainer = kind(config)
        trainer.init()
        manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(manager)
        manager.loop.close()
    finally:
        tq.close()
        # Where verl runs, its actors end with its process; those of the next run have the same names.
        for name in ray.util.list_named_actors():
            ray.kill(ray.get_actor(name))
    return trainer


def logprobs(policy: Any, row: dict[str, Any]) -> np.ndarray:
    """Of each response token, shape [length]."""
    length = len(row["responses"])
    with torch.no_grad():
        rows = policy(row["input_ids"][None]).logits[0, -length - 1 : -1].log_softmax(-1)
    return rows.gather(1, row["responses"][:, None])[:, 0].numpy()


def check(batches: list[list[dict[str, Any]]], first_step: int = 1) -> list[str]:
    """Exact counts, whole groups, own prompts, rewards, and the log-probability of each token's own policy."""
    policies = [tiny.model(seed=version) for version in range(first_step + len(batches))]
    tokenizer = tiny.tokenizer()
    uids = []
    for step, batch in enumerate(batches, first_step):
        assert len(batch) == N * G
        groups = [batch[i : i + G] for i in range(0, N * G, G)]
        for group in groups:
            assert len({row["uid"] for row in group}) == 1
            assert sorted(row["session_id"] for row in group) == list(range(G))
            uids.append(group[0]["uid"])
            for row in group:
                i = row["extra_info"]["index"]
                assert tokenizer.decode(row["prompts"]) == f"prompt {i} of many: "
                text = tokenizer.decode(row["responses"], skip_special_tokens=True)
                assert row["rm_scores"][-1] == len(text) % 2
                assert row["extra_fields"]["reward_extra_info"]["truth"] == i
                versions = np.array(row["extra_fields"]["policy_versions"])
                assert row["tag"]["min_global_steps"] == versions[0]
                assert row["tag"]["max_global_steps"] == versions[-1] <= step - 1
                by_version = np.stack([logprobs(policy, row) for policy in policies])
                own = by_version[versions, np.arange(len(versions))]
                np.testing.assert_allclose(row["rollout_log_probs"].numpy(), own, atol=1e-4)
    assert len(set(uids)) == len(uids), "a group was trained on twice"
    return uids


def test_verl_finds_the_trainer_mode_through_its_own_variable() -> None:
    script = "from verl.trainer.ppo.v1 import get_trainer_cls; print(get_trainer_cls('april').__module__)"
    variables = {**os.environ, "VERL_USE_EXTERNAL_MODULES": plugin.__name__}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == plugin.__name__


def test_the_trainer_mode_brings_sampler_and_agent_loop_manager(config: DictConfig) -> None:
    trainer = plugin.AprilTrainer(config)
    assert type(trainer.replay_buffer) is plugin.AprilReplayBuffer
    assert isinstance(trainer.replay_buffer, ReplayBufferAsync)
    manager = trainer.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    assert load_class_from_fqn(manager) is plugin.AprilRolloutManager


@pytest.mark.parametrize(
    ("package", "version", "line"),
    [
        ("verl", "'0.9.0'", "ImportError: april's integration was written for verl 0.9.1.*, and 0.9.0 is installed: "),
        (
            "TransferQueue",
            "missing(name)",
            "ModuleNotFoundError: april's integration needs TransferQueue 0.1.*, which ",
        ),
    ],
)
def test_another_version_or_none_gives_one_clear_line(package: str, version: str, line: str) -> None:
    script = f"""
import importlib.metadata as metadata
real, package = metadata.version, {package!r}
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = lambda name: {version} if name == package else real(name)
import april.integrations.verl
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(line)
    assert "pip install" in done.stderr.splitlines()[-1]


def test_training_validation_and_a_restart(model: Path, data: Path, tmp_path: Path) -> None:
    """Each step trains on what the one before began and was interrupted in."""
    still = f"+actor_rollout_ref.rollout.custom={{still_from:{N},standing:{N * G}}}"
    settings = (still, "trainer.test_freq=2", "trainer.total_training_steps=4")
    first = train(config_of(model, data, tmp_path / "checkpoints", *settings))
    uids = check(first.batches)
    for batch in first.batches[1:]:
        spans = [len(set(row["extra_fields"]["policy_versions"])) for row in batch]
        assert max(spans) > 1, "no sample was interrupted and resumed: the test saw nothing"

    saved = tmp_path / "checkpoints" / "global_step_4"
    state = json.loads((saved / plugin.STATE).read_text())
    waiting = {
        (group["prompt"]["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in state["scheduler"]["state"]["buffer"]["groups"]
        for sample in group["samples"]
    }
    assert len(waiting) == N * G
    assert any(waiting.values()), "nothing unfinished was saved: the test saw nothing"
    again = train(config_of(model, data, tmp_path / "checkpoints", still, "trainer.total_training_steps=6"))
    assert len(again.batches) == 2
    more = check(again.batches, first_step=5)
    assert not set(uids) & set(more)
    for row in (row for batch in again.batches for row in batch):
        begun = waiting.pop((row["uid"], row["session_id"]), [])
        assert row["responses"][: len(begun)].tolist() == begun
    manager = again.agent_loop_manager
    under_way = {
        (group.prompt.id, sample.index): sample for group in manager.scheduler.buffer for sample in group.samples
    }
    for key, begun in waiting.items():
        assert under_way[key].response_ids[: len(begun)] == begun, "a saved sample was lost"
    trained = [row["extra_info"]["index"] for batch in [*first.batches, *again.batches] for row in batch[::G]]
    prompts = [*trained, *(row["extra_info"]["index"] for row in manager.rows.values())]
    assert sorted(prompts) == list(range(len(prompts))), "a prompt was lost or begun twice across the restart"


def test_verls_own_training_step(model: Path, data: Path, tmp_path: Path) -> None:
    """Two ranks share the policy (FSDP2); their weights go to the replica, and into verl's checkpoint and back."""
    settings = (*SETTINGS, f"+actor_rollout_ref.rollout.custom={{still_from:{N},standing:{N * G}}}")
    first = train(config_of(model, data, tmp_path, *settings, "trainer.total_training_steps=2"), TrainingTrainer)
    weights = first.actor_rollout_wg.weights
    policies = {version: policy_of(version, own) for version, own in weights.items()}
    assert sorted(policies) == [0, 1, 2]
    older = 0
    for step, batch in enumerate(first.batches, 1):
        assert len({row["uid"] for row in batch}) == N
        assert len(batch) == N * G
        for row in batch:
            versions = np.array(row["extra_fields"]["policy_versions"])
            by_version = np.stack([logprobs(policies[version], row) for version in range(step)])
            own = by_version[versions, np.arange(len(versions))]
            np.testing.assert_allclose(row["rollout_log_probs"].numpy(), own, atol=1e-4)
            np.testing.assert_allclose(row["old_log_probs"].numpy(), by_version[-1], atol=1e-4)
            older += int((versions < step - 1).sum())
    assert older, "no token of an older version was trained on: the test saw nothing"
    for metrics in first.steps:
        assert 0 < metrics["actor/grad_norm"] < math.inf
    assert all((weights[1][name] != weights[2][name]).any() for name in weights[1])
    again = train(config_of(model, data, tmp_path, *settings, "trainer.total_training_steps=3"), TrainingTrainer)
    resumed = again.actor_rollout_wg.weights
    assert sorted(resumed) == [2, 3]
    assert all(torch.equal(resumed[2][name], weights[2][name]) for name in weights[2])


def test_groups_without_signal_are_replaced(model: Path, data: Path, tmp_path: Path) -> None:
    filters = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")
    trainer = train(
        config_of(model, data, tmp_path, *filters, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    )
    check(trainer.batches)
    for batch in trainer.batches:
        for i in range(0, N * G, G):
            assert {float(row["rm_scores"].sum()) for row in batch[i : i + G]} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "multi_turn.enable"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "default_agent_loop"),
        ("algorithm.adv_estimator=remax", "adv_estimator"),
        ("+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager", "agent_loop_manager_class"),
        ("trainer.v1.sampler.custom_sampler.name=MySampler", "custom_sampler"),
        ("+trainer.v1.april.parameter_sync_step=2", r"trainer.v1.april.parameter_sync_step = 2: .*ppo_mini_batch_size"),
        ("+trainer.v1.april.max_stalenes=3", "max_stalenes: april has no such setting, only .*max_staleness"),
        ("+trainer.v1.april.max_staleness=-1", "max_staleness = -1"),
        (
            "trainer.v1.april.over_sampling_batch_size=2",
            "over_sampling_batch_size = 2 is less than data.train_batch_size = 3",
        ),
        (
            "trainer.v1.april.over_sampling_batch_size=19",
            "over_sampling_batch_size = 19 cannot keep .*max_staleness = 5: .*at most 18",
        ),
        ("trainer.v1.april.over_sampling_batch_size=most", "over_sampling_batch_size = most: give a number, or auto"),
        ("algorithm.filter_groups={enable:true,metric:null}", "algorithm.filter_groups.metric"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_at_the_start(
    model: Path, data: Path, tmp_path: Path, override: str, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        plugin.AprilTrainer(config_of(model, data, tmp_path, override))
