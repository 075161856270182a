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

import torch
from omegaconf import DictConfig
from transformers import AutoTokenizer
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.import_utils import load_class_from_fqn

from april.integrations import verl as plugin
from april.integrations.verl.trainer import STATE
from tests import tiny
from tests.integrations.verl.cluster import local_cluster
from tests.integrations.verl.trainer import (
    TOOLS_TEMPLATE,
    TinyTrainer,
    call_of,
    config_of,
    policy_of,
    save_policy,
    save_prompts,
    train,
)
from tests.integrations.verl.training import SETTINGS, TrainingTrainer

N, G = 3, 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prompts(tmp_path_factory.mktemp("data") / "prompts.parquet", 40)


@pytest.fixture
def config(model: Path, data: Path, tmp_path: Path) -> DictConfig:
    return config_of(model, data, tmp_path / "checkpoints")


def logprobs(policy: Any, row: dict[str, Any]) -> np.ndarray:
    """Of each response token, shape [length]."""
    length = len(row["responses"])
    with torch.no_grad():
        rows = policy(row["input_ids"][None]).logits[0, -length - 1 : -1].log_softmax(-1)
    return rows.gather(1, row["responses"][:, None])[:, 0].numpy()


def check(batches: list[list[dict[str, Any]]], first_step: int = 1, before: str = "") -> list[str]:
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
                assert tokenizer.decode(row["prompts"]) == f"{before}prompt {i} of many: "
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


def save_processor(path: Path) -> Path:
    """A policy with a processor of images, as vision-language models have."""
    from transformers import MllamaProcessor
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    save_policy(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    special = ["<|image|>", "<|python_tag|>"]
    tokenizer.add_special_tokens({"bos_token": "<unk>", "additional_special_tokens": special})
    template = tokenizer.chat_template
    MllamaProcessor(MllamaImageProcessorPil(), tokenizer, chat_template=template).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}  # verl has no rule for it
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_model_with_a_processor_takes_prompts_of_text(data: Path, tmp_path: Path) -> None:
    model = save_processor(tmp_path / "model")
    config = config_of(model, data, tmp_path / "checkpoints", "trainer.total_training_steps=3")
    check(train(config, TinyTrainer).batches, before="<unk>")


def test_verl_finds_the_trainer_mode_through_its_own_variable() -> None:
    script = "from verl.trainer.ppo.v1 import get_trainer_cls; print(get_trainer_cls('april').__module__)"
    variables = {**os.environ, "VERL_USE_EXTERNAL_MODULES": plugin.__name__}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{plugin.__name__}.trainer"


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
def test_a_wrong_or_missing_version_is_one_clear_line(package: str, version: str, line: str) -> None:
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
    first = train(config_of(model, data, tmp_path / "checkpoints", *settings), TinyTrainer)
    uids = check(first.batches)
    for batch in first.batches[1:]:
        spans = [len(set(row["extra_fields"]["policy_versions"])) for row in batch]
        assert max(spans) > 1, "no sample was interrupted and resumed: the test saw nothing"

    saved = tmp_path / "checkpoints" / "global_step_4"
    state = json.loads((saved / STATE).read_text())
    waiting = {
        (group["prompt"]["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in state["scheduler"]["state"]["buffer"]["groups"]
        for sample in group["samples"]
    }
    assert len(waiting) == N * G
    assert any(waiting.values()), "nothing unfinished was saved: the test saw nothing"
    again = train(
        config_of(model, data, tmp_path / "checkpoints", still, "trainer.total_training_steps=6"), TinyTrainer
    )
    assert len(again.batches) == 2
    more = check(again.batches, first_step=5)
    assert not set(uids) & set(more)
    for row in (row for batch in again.batches for row in batch):
        begun = waiting.pop((row["uid"], row["session_id"]), [])
        assert row["responses"][: len(begun)].tolist() == begun
    manager = again.agent_loop_manager
    under_way = {
        (group.prompt.id, sample.index): sample
        for group in manager.adapter.scheduler.buffer
        for sample in group.samples
    }
    for key, begun in waiting.items():
        assert under_way[key].response_ids[: len(begun)] == begun, "a saved sample was lost"
    trained = [row["extra_info"]["index"] for batch in [*first.batches, *again.batches] for row in batch[::G]]
    prompts = [*trained, *(row["extra_info"]["index"] for row in manager.rows.values())]
    assert sorted(prompts) == list(range(len(prompts))), "a prompt was lost or begun twice across the restart"


def test_a_replica_that_is_killed(model: Path, data: Path, tmp_path: Path) -> None:
    """The remaining replica completes the step, and the run ends with a line that contains the command to resume. The
    resumed run continues until a replica dies between sampling and the next weights."""
    trainers: list[TinyTrainer] = []

    class Kept(TinyTrainer):
        def init(self) -> None:
            trainers.append(self)
            super().init()

    def run(custom: str) -> str:
        settings = ("trainer.n_gpus_per_node=2", "trainer.save_freq=10", "trainer.val_before_train=false")
        custom = f"+actor_rollout_ref.rollout.custom={custom}"
        with pytest.raises(RuntimeError, match="Replica") as raised:
            train(config_of(model, data, tmp_path, *settings, custom), Kept)
        return str(raised.value)

    hint = "verl does not restart replicas. Step {0} was completed. It is saved as {1}/global_step_{0}: start the run"
    said = run(f"{{still_from:{N},standing:1,dies:[1,1,3]}}")
    assert said.startswith(f"Replica tiny-1 has died, and {hint.format(2, tmp_path)}")
    (first,) = trainers
    assert len(first.batches) == 2
    uids = check(first.batches)
    spans = [len(set(row["extra_fields"]["policy_versions"])) for row in first.batches[1]]
    assert max(spans) > 1, "no sample was interrupted before the kill: the test saw nothing"
    lost = first.agent_loop_manager.adapter.scheduler._loop.stats.batch.failures
    assert any("ActorDiedError" in failure.error for failure in lost), "no request was lost: the test saw nothing"

    said = run("{dies:[0,2,0]}")
    assert said.startswith(f"Replica tiny-0 has died, and {hint.format(3, tmp_path)}")
    again = trainers[-1]
    assert not set(uids) & set(check(again.batches, first_step=3))
    (batch,) = again.batches
    # Groups that end early may leave first: a group of the first run is in the batch, or still in flight.
    resumed = {
        (group.prompt.id, sample.index): sample.response_ids
        for group in again.agent_loop_manager.adapter.scheduler.buffer
        for sample in group.samples
    }
    resumed |= {(row["uid"], row["session_id"]): row["responses"].tolist() for row in batch}
    for group in first.agent_loop_manager.adapter.scheduler.buffer:
        for sample in group.samples:
            assert resumed[group.prompt.id, sample.index][: sample.length] == sample.response_ids


def test_an_agent_loop_with_a_tool(model: Path, data: Path, tmp_path: Path) -> None:
    """verl's own loop and tool, two calls in a sample: interrupted in the midst of the second, trained on in the next
    step, and over a restart, after which the loop is run again."""
    with_tools, tokenizer = save_policy(tmp_path / "model", TOOLS_TEMPLATE), tiny.tokenizer()
    rollout = "actor_rollout_ref.rollout"
    settings = (
        *(f"{rollout}.agent.default_agent_loop=tool_agent", f"{rollout}.multi_turn.enable=true"),
        f"{rollout}.multi_turn.function_tool_path={Path(__file__).with_name('tools.py')}",
        *("data.max_response_length=192", "trainer.val_before_train=false"),
        f"+{rollout}.custom={{still_from:{N},standing:{N * G},calls:2}}",
    )
    first = train(
        config_of(with_tools, data, tmp_path / "checkpoints", *settings, "trainer.total_training_steps=2"), TinyTrainer
    )
    again = train(
        config_of(with_tools, data, tmp_path / "checkpoints", *settings, "trainer.total_training_steps=3"), TinyTrainer
    )
    policies = [tiny.model(seed=version) for version in range(3)]
    interrupted, seen = 0, set()
    for step, batch in enumerate([*first.batches, *again.batches], 1):
        assert len(batch) == N * G
        for row in batch:
            i = row["extra_info"]["index"]
            seen.add((i, row["session_id"]))
            assert tokenizer.decode(row["prompts"]) == f"[add]prompt {i} of many: "
            said = tokenizer.decode(row["responses"])
            sampled = row["response_mask"].bool()
            answers = [f"<result>{i + number}</result>" for number in (1, 2)]
            assert tokenizer.decode(row["responses"][~sampled]) == "".join(answers)
            assert said.startswith(call_of(i, 0) + answers[0] + call_of(i, 1) + answers[1])
            assert row["extra_fields"]["tool_rewards"] == [1.0, 2.0]
            assert row["num_turns"] == 2 + 3 + 1, "answers, turns and the prompt, as verl counts"
            assert row["rm_scores"][-1] == len(tokenizer.decode(row["responses"], skip_special_tokens=True)) % 2
            versions = np.array(row["extra_fields"]["policy_versions"])
            assert (versions == -1).tolist() == (~sampled).tolist()
            own = versions[sampled]
            assert row["tag"]["min_global_steps"] == own[0]
            assert row["tag"]["max_global_steps"] == own[-1] <= step - 1
            by_version = np.stack([logprobs(policy, row) for policy in policies])
            drawn = np.where(sampled, by_version[versions, np.arange(len(versions))], 0)
            np.testing.assert_allclose(row["rollout_log_probs"].numpy(), drawn, atol=1e-4)
            interrupted += len(set(own.tolist())) > 1
        if step == 1:
            assert not interrupted
    assert interrupted == 2 * N * G, "samples of later steps were not resumed: the test saw nothing"
    assert len(seen) == 3 * N * G


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
    settings = (*filters, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    trainer = train(config_of(model, data, tmp_path, *settings), TinyTrainer)
    check(trainer.batches)
    for batch in trainer.batches:
        for i in range(0, N * G, G):
            assert {float(row["rm_scores"].sum()) for row in batch[i : i + G]} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("override", "name"),
    [
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
