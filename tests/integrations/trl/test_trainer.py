"""TRL's own trainer, really training a tiny policy for a few steps."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import IA3Config, LoraConfig

from april.extras import install_command
from april.integrations.prompts import DatasetPrompts
from april.integrations.requirement import require
from april.integrations.trl import GRPOTrainer, PartialRollouts
from april.integrations.trl.checkpoint import STATE
from april.integrations.trl.prompts import dataset_prompts
from april.rollout.trajectory.prompt import Prompt
from tests import tiny
from tests.integrations.trl.trainer import SMALL, TEMPLATE, Reward, Watched, rows


def trainer(folder: Path, reward: Any = None, rollouts: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    own = {
        key: settings.pop(key)
        for key in ("eval_dataset", "train_dataset", "rollout_func", "peft_config")
        if key in settings
    }
    return Watched(
        model=settings.pop("model", None) or tiny.model(),
        reward_funcs=reward or Reward(),
        args=trl.GRPOConfig(**{**config, **settings}),
        processing_class=tiny.tokenizer(),
        partial_rollouts=PartialRollouts(
            **{"over_sampling_batch_size": 8, "max_num_seqs": 16, "stream_interval": 2, **(rollouts or {})}
        ),
        **{"train_dataset": rows(), **own},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer after four steps of four groups, eight in flight."""
    reward = Reward()
    trained = trainer(tmp_path_factory.mktemp("run"), reward)
    trained.reward = reward
    trained.train()
    yield trained
    trained.close()


def test_rewards_see_the_row_that_each_completion_belongs_to(run: Any) -> None:
    given = [group for groups, _ in run.batches for group in groups]
    assert run.reward.seen == [(f"{n}?", n) for group in given for n in [group.prompt.metadata["answer"]] * 4]
    for group in given:
        assert run.processing_class.decode(group.prompt.token_ids) == group.prompt.metadata["prompt"]
    assert len(given) == 16
    assert len({group.id for group in given}) == 16


def test_partial_rollouts_are_carried_over_steps_and_logged(run: Any) -> None:
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["april/policy_version"] for entry in logged] == [0, 1, 2, 3]
    assert logged[0]["april/off_policy_token_share"] == 0
    assert any(entry["april/off_policy_token_share"] > 0 for entry in logged)
    assert any(entry["april/samples_resumed"] > 0 for entry in logged)
    for (groups, _), entry in zip(run.batches, logged, strict=True):
        staleness = [group.staleness(int(entry["april/policy_version"])) for group in groups]
        assert entry["april/staleness_max"] == max(staleness) <= 5
        assert entry["april/step_consumed_tokens"] == sum(group.tokens for group in groups)


def test_the_effective_sample_size_and_the_kl_are_those_of_the_samples_that_were_trained_on(run: Any) -> None:
    first, *later = [entry for entry in run.state.log_history if "loss" in entry]
    assert first["april/ess"] == pytest.approx(1, abs=1e-4)  # every token is of the policy that is trained
    assert first["april/kl_behaviour"] == pytest.approx(0, abs=1e-5)
    assert all(entry["april/ess"] < 0.999 and entry["april/kl_behaviour"] > 1e-5 for entry in later)


def test_metrics_that_only_some_batches_have_are_aggregated_over_those(run: Any) -> None:
    common = {"staleness_max": 1, "rollout_seconds": 2.0}
    surplus = {"staleness_max": 3, "step_consumed_tokens": 200, "rollout_seconds": 1e-5}
    run.rollouts.metrics = [
        {**common, "step_consumed_tokens": 200, "consumed_tokens_per_second": 100.0},
        {**common, "step_consumed_tokens": 400, "consumed_tokens_per_second": 200.0, "samples_redrafted": 6},
        surplus,
    ]
    taken = run.rollouts.take_metrics()
    assert taken["samples_redrafted"] == 6
    assert taken["staleness_max"] == 3
    assert taken["consumed_tokens_per_second"] == pytest.approx(200, rel=1e-4)
    run.rollouts.metrics = [surplus]
    assert "consumed_tokens_per_second" not in run.rollouts.take_metrics()


def test_generation_kwargs_override_the_sampling_parameters(tmp_path: Path) -> None:
    """With top_k = 1 all responses to a prompt are the same."""
    kwargs = {"top_k": 1, "do_sample": True}
    settings = {"temperature": 0.9, "generation_kwargs": kwargs, "max_steps": 1, "max_completion_length": 12}
    greedy = trainer(tmp_path, rollouts={"over_sampling_batch_size": 4}, **settings)
    greedy.train()
    for group in greedy.batches[0][0]:
        assert len({tuple(sample.response_ids) for sample in group.samples}) == 1
    assert greedy.rollouts.adapter.scheduler.sampling.temperature == 0.9
    greedy.close()


def test_transformers_continuous_batching_is_named_as_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, use_transformers_continuous_batching=True).close()
    assert "use_transformers_continuous_batching = True is ignored" in caplog.text


def test_drafts_leave_no_stale_token(tmp_path: Path) -> None:
    trained = trainer(tmp_path, rollouts={"on_update": "redraft"})
    trained.train()
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert any(entry.get("april/samples_redrafted", 0) > 0 for entry in logged)
    for version, (groups, _) in enumerate(trained.batches):
        assert {v for group in groups for sample in group.samples for v in sample.versions.tolist()} == {version}
    trained.close()


def test_the_ratio_divides_by_the_log_probabilities_tokens_were_drawn_with(run: Any) -> None:
    off_policy = 0
    for version, (groups, output) in enumerate(run.batches):
        samples = [sample for group in groups for sample in group.samples]
        for i, sample in enumerate(samples):
            assert output["completion_ids"][i, : sample.length].tolist() == sample.response_ids
            assert output["prompt_ids"][i].tolist()[-len(sample.prompt_ids) :] == list(sample.prompt_ids)
            old = output["old_per_token_logps"][i, : sample.length]
            torch.testing.assert_close(old, torch.tensor(sample.logprobs), rtol=0, atol=0)
            off_policy += int((sample.versions < version).sum())
    assert off_policy > 0


def test_on_policy_log_probabilities_are_those_of_the_trainers_own_forward_pass(tmp_path: Path) -> None:
    on_policy = trainer(tmp_path, rollouts={"over_sampling_batch_size": 4}, max_steps=1, temperature=0.7)
    on_policy.model.train()
    inputs = next(iter(on_policy.get_train_dataloader()))
    output = on_policy._generate_and_score_completions(inputs)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        own = on_policy._get_per_token_logps_and_entropies(
            on_policy.model, ids, mask, output["completion_ids"].shape[1]
        )[0]
    kept = output["completion_mask"].bool()
    torch.testing.assert_close(output["old_per_token_logps"][kept], own[kept], rtol=1e-4, atol=1e-4)
    on_policy.close()


@pytest.mark.parametrize("on_update", ["recompute", "keep", "redraft"])
def test_a_resumed_run_trains_on_the_same_samples_as_the_saved_one(tmp_path: Path, on_update: str) -> None:
    def history(trained: Any) -> list[list[float]]:
        logged = [entry for entry in trained.state.log_history if "loss" in entry]
        return [[entry["loss"], entry["reward"], entry["april/off_policy_token_share"]] for entry in logged]

    settings = {"save_strategy": "steps", "save_steps": 2}
    straight = trainer(tmp_path, rollouts={"on_update": on_update}, **settings)
    straight.train()
    straight.close()
    saved = json.loads((tmp_path / "checkpoint-2" / STATE).read_text())["scheduler"]
    assert sum(map(len, (s["segments"] for g in saved["state"]["buffer"]["groups"] for s in g["samples"]))) > 0

    resumed = trainer(tmp_path, rollouts={"on_update": on_update}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed.close()
    assert history(resumed) == history(straight)
    taken = [[group.to_dict() for group in groups] for groups, _ in resumed.batches]
    assert taken == [[group.to_dict() for group in groups] for groups, _ in straight.batches[2:]]
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_without_rollouts_is_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    first.close()
    saved = tmp_path / "checkpoint-1" / STATE
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "format": 0}))
    with pytest.raises(ValueError, match=r"april.json: the rollouts were saved in format 0, and this april reads 2"):
        first.train(resume_from_checkpoint=True)
    saved.unlink()
    second = trainer(tmp_path, max_steps=2)
    second.train(resume_from_checkpoint=True)
    second.close()
    assert len(second.batches) == 1
    assert f"checkpoint-1 contains no {STATE}" in caplog.text


def test_evaluation_generates_for_exactly_the_requested_rows(tmp_path: Path) -> None:
    reward = Reward()
    held_out = rows(6, first=100)
    evaluated = trainer(
        tmp_path,
        reward,
        eval_dataset=held_out,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        max_steps=2,
    )
    evaluated.train()
    waiting = evaluated.rollouts.adapter.state_dict()
    assert waiting["scheduler"]["state"]["buffer"]["groups"]
    reward.seen.clear()
    evaluated.evaluate()
    asked = [(row["prompt"], row["answer"]) for row in held_out for _ in range(2)]
    assert sorted(reward.seen) == sorted(asked)
    assert evaluated.rollouts.adapter.state_dict() == waiting
    assert "eval_reward" in evaluated.state.log_history[-1]
    evaluated.close()


def test_several_updates_a_generation_batch_count_as_one_version(tmp_path: Path) -> None:
    several = trainer(tmp_path, gradient_accumulation_steps=1, steps_per_generation=2, max_steps=6)
    several.train()
    assert len(several.batches) == 3
    assert several.rollouts.adapter.version == 2
    several.close()


def test_a_second_training_continues_with_a_new_version(tmp_path: Path) -> None:
    """Its optimizer steps are counted from 0 again, as the only one of the first was."""
    twice = trainer(tmp_path, max_steps=1)
    twice.train()
    twice.train()
    assert twice.rollouts.adapter.version == 1
    twice.close()


def test_prompts_are_tokenized_as_trl_does(tmp_path: Path) -> None:
    messages = [[{"role": "system", "content": "count"}, {"role": "user", "content": f"{n}?"}] for n in range(24)]
    chat = trainer(tmp_path, max_steps=1, train_dataset=Dataset.from_dict({"prompt": ["7?"] * 24, "answer": [7] * 24}))
    chat.processing_class.chat_template = TEMPLATE
    for prompts in (["7?", "12?"], messages[:3]):
        theirs = chat._tokenize_prompts(prompts)[0]
        assert [list(chat.rollouts.encode({"prompt": p}).token_ids) for p in prompts] == theirs
    chat.close()


def test_conversations_train_too(tmp_path: Path) -> None:
    def reward(prompts: list[Any], completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        for prompt, completion, number in zip(prompts, completions, answer, strict=True):
            assert prompt == [{"role": "user", "content": f"{number}?"}]
            assert completion[0]["role"] == "assistant"
        return [1.0] * len(prompts)

    data = {"prompt": [[{"role": "user", "content": f"{n}?"}] for n in range(24)], "answer": list(range(24))}
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=10,
            use_cpu=True,
            bf16=False,
            max_steps=2,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
    )
    chat.train()
    chat.close()


def test_extra_rows_give_every_row_once_an_epoch_also_after_a_restart() -> None:
    def encode(row: Any) -> Prompt:
        return Prompt((row["answer"],))

    def drawn(stream: DatasetPrompts, count: int) -> list[int]:
        return [next(stream).token_ids[0] for _ in range(count)]

    whole = drawn(dataset_prompts(rows(10), encode, 3), 25)
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]
    first, second = dataset_prompts(rows(10), encode, 3), dataset_prompts(rows(10), encode, 3)
    begun = drawn(first, 13)
    second.load_state_dict(first.state_dict())
    assert begun + drawn(second, 12) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.1}, r"repetition_penalty = 1.1: .*leave it at 1"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs: num_beams = 2: april takes temperature, top_p"),
        ({"generation_kwargs": {"repetition_penalty": 1.1}}, "generation_kwargs: repetition_penalty = 1.1: "),
        ({"remove_unused_columns": True}, "remove_unused_columns = True"),
        ({"train_dataset": list(rows())}, "train_dataset is a list: pass a datasets.Dataset or IterableDataset"),
        ({"train_dataset": rows().add_column("when", [b"x"] * 24)}, "column 'when' holds a bytes"),
        ({"rollouts": {"over_sampling_batch_size": 40}}, "over_sampling_batch_size = 40 cannot keep max_staleness = 5"),
        ({"rollouts": {"over_sampling_batch_size": 3}}, r"over_sampling_batch_size = 3 is less than N .* = 4"),
        ({"rollouts": {"over_sampling_batch_size": "many"}}, "over_sampling_batch_size = 'many': .* 'auto'"),
        ({"rollouts": {"engine": "vlm"}}, "engine = 'vlm': .*'vllm', 'sglang'"),
        ({"rollouts": {"max_num_seqs": 0}}, "max_num_seqs = 0: must be positive"),
        ({"rollouts": {"engine": "vllm", "weight_transfer": "adapters"}}, 'are merged here: "disk" or "broadcast"'),
        ({"rollouts": {"urls": ("http://127.0.0.1:9",)}}, 'urls is set but engine = "embedded"'),
        ({"rollouts": {"engine": "vllm", "urls": ("127.0.0.1:9",)}}, 'write each as "http://host:port"'),
        ({"rollouts": {"engine": "vllm", "urls": "http://127.0.0.1:9"}}, "urls = 'http://127.0.0.1:9': .* array"),
        ({"use_vllm": True}, r'vllm_mode = "colocate": vLLM is not in this environment; .*vllm_mode="server"'),
        (
            {"use_vllm": True, "vllm_mode": "server", "rollouts": {"engine": "sglang"}},
            "use_vllm = True names the server",
        ),
        ({"train_dataset": rows().rename_column("prompt", "question")}, 'no column "prompt", only question, answer'),
        ({"train_dataset": rows(0)}, "train_dataset: it has no rows"),
        ({"rollout_func": print}, "rollout_func: it returns whole completions, which april cannot interrupt"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        trainer(tmp_path, **settings)
    assert "\n" not in str(caught.value)


def test_several_gpus_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.GRPOConfig, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"2 GPUs in one process: .* accelerate launch .* by CUDA_VISIBLE_DEVICES=0"):
        trainer(tmp_path)


@pytest.mark.parametrize("config", [LoraConfig(use_dora=True), LoraConfig(modules_to_save=["lm_head"]), IA3Config()])
def test_adapters_that_are_not_merged_are_refused_in_one_line(tmp_path: Path, config: Any) -> None:
    config.target_modules = {"q_proj"}
    if isinstance(config, IA3Config):
        config.feedforward_modules = set()
    with pytest.raises(
        ValueError, match=r"peft_config: adapter 'default' .*only merges LoRA without use_dora"
    ) as caught:
        trainer(tmp_path, peft_config=config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_adapters_are_trained_and_generate(tmp_path: Path, beta: float) -> None:
    """The engine draws from the policy with its adapters merged in; the parameters they are added to never change."""
    before = {name: parameter.clone() for name, parameter in tiny.model().named_parameters()}
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    lora = trainer(tmp_path, peft_config=config, rollouts={"over_sampling_batch_size": 4}, max_steps=3, beta=beta)
    lora.train()
    for version, (groups, _) in enumerate(lora.batches):
        versions = {v for group in groups for sample in group.samples for v in sample.versions.tolist()}
        assert versions == {version}
    lora.model.train()
    output = lora._generate_and_score_completions(next(iter(lora.get_train_dataloader())))
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        own = lora._get_per_token_logps_and_entropies(lora.model, ids, mask, output["completion_ids"].shape[1])[0]
        with lora.model.disable_adapter():
            bare = lora._get_per_token_logps_and_entropies(lora.model, ids, mask, output["completion_ids"].shape[1])[0]
    kept = output["completion_mask"].bool()
    torch.testing.assert_close(output["old_per_token_logps"][kept], own[kept], rtol=1e-4, atol=1e-4)
    assert (output["old_per_token_logps"] - bare)[kept].abs().max() > 1e-2
    if beta:
        torch.testing.assert_close(output["ref_per_token_logps"][kept], bare[kept], rtol=1e-5, atol=1e-5)
    for name, parameter in lora.model.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])
    lora.close()


def test_a_streamed_dataset_trains_and_resumes_after_a_restart(tmp_path: Path) -> None:
    def run(resume: bool) -> Any:
        streamed = trainer(tmp_path, train_dataset=rows().to_iterable_dataset(), save_strategy="steps", save_steps=2)
        streamed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        streamed.close()
        return [[group.to_dict() for group in groups] for groups, _ in streamed.batches]

    straight = run(resume=False)
    assert len({group["id"] for batch in straight for group in batch}) == 16
    assert run(resume=True) == straight[2:]


def test_rows_of_a_stream_repeat_by_epoch_and_resume_after_a_restart() -> None:
    def drawn(stream: DatasetPrompts, count: int) -> list[int]:
        return [next(stream).token_ids[0] for _ in range(count)]

    def stream() -> DatasetPrompts:
        return dataset_prompts(rows(10).to_iterable_dataset(), lambda row: Prompt((row["answer"],)), 3)

    assert drawn(stream(), 25) == [n % 10 for n in range(25)]
    for begun in (3, 10, 13):
        first, second = stream(), stream()
        drawn(first, begun)
        second.load_state_dict(first.state_dict())
        assert drawn(second, 12) == [n % 10 for n in range(begun, begun + 12)]


def test_settings_of_another_kind_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"partial_rollouts is a dict: pass PartialRollouts\(...\)"):
        GRPOTrainer(tiny.model(), Reward(), train_dataset=rows(), partial_rollouts={"max_num_seqs": 8})


def test_another_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    require("trl", "1.15", "1.16", extra="trl")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.160.0")
    with pytest.raises(ImportError, match=r"trl 1\.16\.\*, and 1\.160\.0 is installed: pip install 'trl==1\.16\.\*'"):
        require("trl", "1.16", extra="trl")
    monkeypatch.setenv("APRIL_ANY_VERSION", "1")
    with pytest.warns(UserWarning, match=r"written for trl 1\.16\.\*, and 1\.160\.0 is installed"):
        require("trl", "1.16", extra="trl")


@pytest.mark.parametrize("module", ["trl", "trl.async_grpo"])
def test_without_trl_both_trainers_name_the_package_to_install(module: str) -> None:
    script = f"""
import sys, importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "trl":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version, sys.modules["trl"] = version, None
import april.integrations.{module}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    expected = "ModuleNotFoundError: april's integration needs trl 1.16.*, which is not installed: "
    assert done.stderr.splitlines()[-1] == expected + install_command("trl")


def test_a_missing_framework_is_named_with_its_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install .*\[nowhere\]'"):
        require("no-such-framework", "1", extra="nowhere")


def test_the_example_changes_three_lines() -> None:
    folder = Path(__file__).parents[3] / "examples" / "trl"
    plain, changed = ((folder / f"gcd_{name}.py").read_text().split('"""', 2)[2] for name in ("trl", "april"))
    lines = [line for line in difflib.ndiff(plain.splitlines(), changed.splitlines()) if line[:2] in ("+ ", "- ")]
    added = [line for line in lines if line.startswith("+ ") and line[2:].strip()]
    assert len(added) == 3
    assert len(lines) - len(added) == 2, "one line is gone, and an empty one is new"
