"""TRL's `vllm_mode = "colocate"`: on vLLM if it is installed (`make test-trl-colocate`), and otherwise on a stand-in
that is stricter than vLLM (`stand_ins/vllm`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from trl.generation import vllm_generation

from april.engines.servers import installed
from tests.integrations.trl.colocated import STAND_INS, VLLM, llm_class, trainer
from tests.integrations.trl.launch import launch
from tests.integrations.trl.test_sharded import FSDP2
from tests.integrations.trl.trainer import largest

EXACT = 1e-4
"""Largest difference of log-probabilities between the stand-in and the trainer, both in float32."""
SYNCED = ["load_weights", "reset_prefix_cache"]
SERVED = ["wake weights", *SYNCED, "wake kv_cache", "add_request", "sleep"]


@pytest.fixture(autouse=True)
def _llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The class that TRL builds; the stand-in looks like an installed package."""
    if VLLM:
        monkeypatch.setattr(vllm_generation, "LLM", llm_class())
        yield
        return
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr(vllm_generation, "LLM", llm_class(), raising=False)
    yield
    for name in ("vllm", "vllm.sampling_params"):
        del sys.modules[name]


@pytest.mark.parametrize("sleeps", [False, True])
def test_samples_are_interrupted_and_resumed_in_trls_order_of_calls(tmp_path: Path, sleeps: bool) -> None:
    trained = trainer(tmp_path, vllm_enable_sleep_mode=sleeps)
    trained.train()
    assert trained.vllm_generation.llm.calls == (["sleep", *SERVED * 4] if sleeps else [*SYNCED, "add_request"] * 4)
    assert [entry["april/policy_version"] for entry in logs(trained)] == [0, 1, 2, 3]
    assert any(entry["april/samples_resumed"] > 0 for entry in logs(trained))
    current, older = largest(trained.differences)
    assert current < EXACT
    assert older > EXACT, "no update changed the policy: the test saw nothing"
    trained.close()


def logs(trained: Any) -> list[dict[str, Any]]:
    return [entry for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_trls_code_merges_adapters(tmp_path: Path, adapters: dict[str, Any]) -> None:
    """Of kinds that april itself does not merge, too."""
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **adapters)
    trained = trainer(tmp_path, peft_config=config, vllm_enable_sleep_mode=True, max_steps=3)
    trained.train()
    current, older = largest(trained.differences)
    assert current < EXACT < older
    trained.close()


def test_an_evaluation_is_of_the_requested_rows_and_leaves_the_rollouts(tmp_path: Path) -> None:
    trained = trainer(tmp_path, vllm_enable_sleep_mode=True, eval_strategy="steps", eval_steps=2, max_steps=3)
    trained.train()
    evaluated = [answer for _, answer in trained.reward_funcs[0].seen if answer >= 100]
    counts = Counter(evaluated)
    assert set(counts) == {100, 101, 102, 103}
    assert len(set(counts.values())) == 1
    assert any(entry["april/samples_resumed"] > 0 for entry in logs(trained)[2:])
    assert largest(trained.differences)[0] < EXACT
    trained.close()


def test_a_resumed_run_has_the_unfinished_groups(tmp_path: Path) -> None:
    first = trainer(tmp_path, vllm_enable_sleep_mode=True, save_strategy="steps", save_steps=2, max_steps=2)
    first.train()
    unfinished = {group.id: group.samples[0].response_ids for group in first.rollouts.adapter.scheduler.buffer}
    first.close()
    resumed = trainer(tmp_path, vllm_enable_sleep_mode=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trained = {group.id: group.samples[0].response_ids for groups, _ in resumed.batches for group in groups}
    assert any(unfinished.values())
    for group, tokens in unfinished.items():
        assert trained[group][: len(tokens)] == tokens
    resumed.close()


@pytest.mark.parametrize("rollouts", [{}, {"max_num_seqs": "auto"}])
def test_slots(tmp_path: Path, rollouts: dict[str, Any]) -> None:
    """Set by `max_num_seqs`; otherwise at least TRL's limit, which is the samples of a batch."""
    rollouts = {"over_sampling_batch_size": "auto", **rollouts}
    made = trainer(tmp_path, rollouts, per_device_train_batch_size=72, gradient_accumulation_steps=1)
    slots = made.vllm_generation.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    assert slots == (72 if "max_num_seqs" in rollouts else 8)
    made.close()


def job(folder: Path, options: str = "--multi_gpu", **settings: Any) -> list[dict[str, Any]]:
    """Run two processes, and return what each of them saw."""
    done = launch(options, "colocated", str(folder), json.dumps(settings))
    seen = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in seen), done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in seen]


def test_two_processes_with_an_llm_each(tmp_path: Path) -> None:
    """They exchange orders every five steps, not after every token."""
    leader, follower = ranks = job(tmp_path, vllm_enable_sleep_mode=True)
    for rank in ranks:
        assert rank["calls"] == ["sleep", *SERVED * 4]
        assert max(current for current, _ in rank["differences"]) < EXACT
    assert max(older for rank in ranks for _, older in rank["differences"]) > EXACT
    assert leader["policy"] == follower["policy"]
    assert any(entry["april/samples_resumed"] > 0 for entry in leader["logs"])
    polls = leader["rounds"].count("poll")
    assert all(rank["steps"] > 3 * polls for rank in ranks), (polls, [rank["steps"] for rank in ranks])
    assert follower["rounds"] == []


@pytest.mark.slow
def test_trls_code_gathers_a_sharded_policy(tmp_path: Path) -> None:
    ranks = job(tmp_path, FSDP2, vllm_enable_sleep_mode=True)
    for rank in ranks:
        assert rank["sharded"]
        assert rank["calls"] == ["sleep", *SERVED * 4]
        assert max(current for current, _ in rank["differences"]) < EXACT
    assert max(older for rank in ranks for _, older in rank["differences"]) > EXACT


def test_two_processes_that_compute_one_llm_together(tmp_path: Path) -> None:
    """The stand-in compares the batches of both processes in every step. vLLM would wait forever."""
    leader, follower = ranks = job(tmp_path, vllm_tensor_parallel_size=2, vllm_enable_sleep_mode=True)
    assert leader["steps"] == follower["steps"]
    assert leader["calls"] == follower["calls"] == ["sleep", *SERVED * 4]
    for rank in ranks:
        assert max(current for current, _ in rank["differences"]) < EXACT
    assert any(entry["april/samples_resumed"] > 0 for entry in leader["logs"])
    groups = [[row["group"] for row in [*first, *second]] for first, second in zip(*batches(ranks), strict=True)]
    assert all(len(set(batch)) == 3 for batch in groups)


def batches(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    return [rank["batches"] for rank in ranks]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts": {"engine": "sglang"}}, "with engine = 'sglang' in PartialRollouts: GRPOConfig sets up vLLM"),
        ({"rollouts": {"context_length": 128}}, "with context_length = 128 in PartialRollouts: .*leave context_length"),
        ({"rollouts": {"kv_cache_gb": 1.0}}, "with kv_cache_gb = 1.0 in PartialRollouts"),
        ({"rollouts": {"on_update": "keep"}}, 'on_update = "keep": vLLM in this process computes anew only'),
        ({"rollouts": {"on_update": "redraft"}}, 'on_update = "redraft": vllm-inproc verifies no drafts'),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex: .*leave it out"),
        ({"vllm_tensor_parallel_size": 2}, r"tensor_parallel_size \(2\) must divide world size \(1\) evenly"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        trainer(tmp_path, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "refused"), [("0.21.2", True), ("0.22.0", False), ("0.33.0", True)])
def test_another_vllm_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    real = installed.metadata.version
    monkeypatch.setattr(installed.metadata, "version", lambda name: version if name.startswith("vllm") else real(name))
    if not refused:
        trainer(tmp_path).close()
        return
    with pytest.raises(ValueError, match=f"vLLM {version} is installed, and april takes 0.22 up to"):
        trainer(tmp_path)
    monkeypatch.setenv("APRIL_ANY_VERSION", "1")
    trainer(tmp_path).close()
