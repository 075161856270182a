"""TRL's asynchronous trainer on a CPU, with stand-ins for the flash attention kernel and the peak FLOPs of a GPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from april.integrations.trl import PartialRollouts
from april.integrations.trl.async_grpo import AsyncGRPOTrainer
from april.integrations.trl.checkpoint import STATE
from tests import tiny
from tests.integrations.trl import tools as trl_tools
from tests.integrations.trl.launch import launch
from tests.integrations.trl.on_cpu import without_a_gpu
from tests.integrations.trl.trainer import SMALL, TEMPLATE, Reward
from tests.limits import HANG


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def trainer(
    folder: Path,
    reward: Any = None,
    rollouts: dict[str, Any] | None = None,
    adapter: Any = None,
    kind: type[AsyncGRPOConfig] = AsyncGRPOConfig,
    given: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What of the settings is not the config's, `given` has."""
    model = folder / f"model-{os.environ.get('RANK', 0)}"
    if not model.exists():
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = TEMPLATE
        tiny.model().save_pretrained(model)
        tokenizer.save_pretrained(model)
    config = {
        **SMALL,
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
    }
    data = {"prompt": [[{"role": "user", "content": f"{n}?"}] for n in range(24)], "answer": list(range(24))}
    return AsyncGRPOTrainer(
        str(model),
        reward or Reward(),
        kind(**{**config, **settings}),
        Dataset.from_dict(data),
        partial_rollouts=PartialRollouts(
            **{"over_sampling_batch_size": 8, "max_num_seqs": 16, "stream_interval": 2, **(rollouts or {})}
        ),
        peft_config=adapter,
        **(given or {}),
    )


def test_it_trains_one_batch_ahead_on_true_rows_and_drops_nothing(tmp_path: Path) -> None:
    reward = Reward()
    trained = trainer(tmp_path, reward)
    before = [parameter.clone() for parameter in trained.model.parameters()]
    trained.train()
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert not any("sample/dropped_stale_total" in entry for entry in logged)
    assert all(entry["batch/samples_per_step"] == 16 for entry in logged)
    assert 0 < max(entry["sample/staleness_max"] for entry in logged) <= 4
    assert any(entry.get("april/off_policy_token_share", 0) > 0 for entry in logged)
    assert all("rewards/reward" in entry for entry in logged)
    assert all(prompt == [{"role": "user", "content": f"{answer}?"}] for prompt, answer in reward.seen)
    assert any(not torch.equal(b, p) for b, p in zip(before, trained.model.parameters(), strict=True))


def test_samples_of_the_current_version_have_a_ratio_of_one(tmp_path: Path) -> None:
    """The first batch is trained on under the weights that drew it: its ratio is 1, and its KL to them 0."""
    trained = trainer(tmp_path, max_steps=1)
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["ratio"] == pytest.approx(1, abs=1e-4)
    assert logged["kl"] == pytest.approx(0, abs=1e-4)


def test_the_engine_gets_the_trained_weights(tmp_path: Path) -> None:
    trained = trainer(tmp_path, max_steps=3)
    trained.train()
    for own, theirs in zip(trained.rollout_worker.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_adapters_are_trained_and_merged_for_the_engine(tmp_path: Path) -> None:
    """The first batch has a ratio of 1 to a policy with active adapters; the engine gets the trained weights."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    trained = trainer(tmp_path, max_steps=2, adapter=adapter)
    trained.train()
    assert trained.state.log_history[0]["ratio"] == pytest.approx(1, abs=1e-4)
    generates = dict(trained.rollouts.model.named_parameters())
    merged = dict(trained.model.merge_and_unload().named_parameters())
    assert set(generates) <= set(merged)
    base = dict(tiny.model().named_parameters())
    changed = {name for name, own in generates.items() if not torch.equal(own, base[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "up_proj"}
    for name, own in generates.items():
        torch.testing.assert_close(own, merged[name])


def test_tools_are_called_during_generation_and_their_results_are_not_trained_on(tmp_path: Path) -> None:
    given = {"tools": [trl_tools.look], "processing_class": trl_tools.tokenizer()}
    tiny.model(vocab_size=len(trl_tools.WORDS), sharpness=2.0).save_pretrained(tmp_path / "model-0")
    trained = trainer(tmp_path, trl_tools.reward, given=given, max_steps=2, save_strategy="steps", save_steps=1)
    rows, made = [], trained.rollouts._rows

    def kept(group: Any) -> Any:
        rows.extend(zip(group.samples, made(group), strict=True))
        return (row for _, row in rows[-len(group.samples) :])

    trained.rollouts._rows = kept
    trained.train()
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert logged[0]["ratio"] == pytest.approx(1, abs=1e-4), "what tools answered is before the tokens that follow"
    assert logged[0]["tools/call_frequency"] > 0
    tokenizer, answers = given["processing_class"], 0
    for sample, row in rows:
        assert row.input_ids.tolist() == [*sample.prompt_ids, *sample.response_ids]
        own = row.completion_mask[len(sample.prompt_ids) :]
        answered = [transition for transition in sample.transitions[1:] if transition.tokens]
        for transition in answered:
            at = slice(transition.start, transition.start + transition.tokens)
            assert not own[at].any()
            for message in transition.info["messages"]:
                written = tokenizer.decode(tokenizer(text=message["content"])["input_ids"])
                assert written in tokenizer.decode(sample.response_ids[at])
        answers += len(answered)
        assert own.sum() == sum(len(sample.turn_ids(turn)) for turn, _ in enumerate(sample.transitions))
        assert trl_tools.called(row.completion) == sum(len(transition.info["messages"]) for transition in answered)
    assert answers
    state = json.loads((tmp_path / "run" / "checkpoint-1" / STATE).read_text())
    begun = {group["id"] for group in state["scheduler"]["state"]["buffer"]["groups"]}
    resumed = trainer(tmp_path, trl_tools.reward, given=given, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert begun
    assert begun & resumed._trained_groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("adapters", "--multi_gpu"),
        ("fsdp2", "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    ],
)
def test_two_processes_train_on_the_samples_of_one(tmp_path: Path, how: str, options: str) -> None:
    done = launch(options, "async_job", str(tmp_path), how)
    seen = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in seen), done.stderr[-3000:]
    first, second = (json.loads(path.read_text()) for path in seen)
    assert first["trained"] == second["trained"], "the processes train different policies"
    assert not second["generates"]
    assert first["changed"], "no weight was trained: the test saw nothing"
    for name, total in first["generates"].items():
        assert first["trained"][name] == pytest.approx(total, abs=1e-3)
    assert len(first["logs"]) == 4
    assert all(entry["batch/samples_per_step"] == 16 for entry in first["logs"])
    assert first["logs"][0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert done.returncode != 0
    [said] = [line for line in done.stderr.splitlines() if line.startswith("april: ")]
    assert f'resume_from_checkpoint="{tmp_path / "run" / "checkpoint-4"}"' in said


def test_it_is_never_more_than_one_batch_ahead_and_keeps_the_bound(tmp_path: Path) -> None:
    """The worker as the trainer drives it: sync, start, take a batch, sync again."""
    worker = trainer(tmp_path, max_staleness=2).rollout_worker
    weights = [(name, parameter.detach().clone()) for name, parameter in worker.model.named_parameters()]
    worker.send_weights(iter(weights))
    worker.update_model_version(1)
    worker.start()
    ids = []
    for version in range(1, 6):
        taken = [worker.rollout_buffer.get(timeout=HANG) for _ in range(16)]
        assert all(version - sample.model_version <= 2 for sample in taken)
        ids += [sample.group_id for sample in taken[::4]]
        assert [sample.group_id for sample in taken] == [id for id in ids[-4:] for _ in range(4)]
        ahead: dict[str, Any] = {"batches": []}
        while len(ahead["batches"]) < 2:  # every call gives the producer a turn
            worker.check_health(60)
            ahead = worker.state_dict()
            assert len(ahead["batches"]) <= 2
        worker.send_weights(iter(weights))
        worker.update_model_version(version + 1)
        worker.check_health(60)
    assert len(set(ids)) == 20
    worker.stop()


def test_generation_continues_while_two_batches_wait_for_the_trainer(tmp_path: Path) -> None:
    worker = trainer(tmp_path, max_staleness=2).rollout_worker
    worker.send_weights((name, parameter.detach().clone()) for name, parameter in worker.model.named_parameters())
    worker.start()
    finished, deadline = 0, time.monotonic() + HANG
    while finished < 16:  # all that the bound allows behind them
        assert time.monotonic() < deadline, "nothing is sampled beside training"
        state = worker.state_dict()
        groups = state["scheduler"]["state"]["buffer"]["groups"]
        finished = sum(sample["finish"] is not None for group in groups for sample in group["samples"])
        finished *= len(state["batches"]) == 2
    worker.stop()


def test_a_resumed_run_continues_with_waiting_samples(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / STATE).read_text())
    waiting = [group["id"] for batch in state["batches"] for group in batch]
    begun = [group["id"] for group in state["scheduler"]["state"]["buffer"]["groups"]]
    assert len(waiting) in (4, 8)
    assert begun

    second = trainer(tmp_path, max_steps=4)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    assert len(second._trained_groups) >= 8
    assert set(waiting) <= second._trained_groups
    assert all("rewards/reward" in entry for entry in second.state.log_history if "loss" in entry)
    assert not any("sample/dropped_stale_total" in entry for entry in second.state.log_history)


def test_a_failing_reward_stops_the_training_with_its_cause(tmp_path: Path) -> None:
    def broken(**_: Any) -> list[float]:
        raise RuntimeError("cannot parse this answer")

    failing = trainer(tmp_path, broken, heartbeat_stale_after_s=30)
    with pytest.raises(RuntimeError, match=r"the rollouts have stopped: .*cannot parse this answer"):
        failing.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": 4096}, "token_budget = 4096: april counts the samples of an update"),
        ({"num_generations": 5}, "num_generations = 5: must divide the 16 samples"),
        ({"adapter": IA3Config()}, "peft_config: IA3 was not run with april; only LoRA"),
        ({"max_staleness": 0}, "max_staleness = 0: batches are taken one weight sync ahead"),
        (
            {"rollouts": {"over_sampling_batch_size": 40}},
            "over_sampling_batch_size = 40 cannot keep max_staleness = 4",
        ),
        (
            {"given": {"environment_factory": trl_tools.Box}},
            "environment_factory: april's AsyncGRPOTrainer does not support",
        ),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1: april samples from the unmodified policy"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        trainer(tmp_path, **settings)
    assert "\n" not in str(caught.value)


def test_deepspeed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    args = AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    args.deepspeed_plugin = object()
    with pytest.raises(ValueError, match="DEEPSPEED: TRL's AsyncGRPOTrainer gathers weights of DDP and FSDP2 only"):
        AsyncGRPOTrainer("no such model", Reward(), args)
