"""A run's prompts are tried with its policy's tokenizer before the first step."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from april.config.error import ConfigError
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.training.build import open_trainer
from tests import tiny

RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "data.jsonl"
reward = "builtins:len"
{task}
[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
max_response_length = 16
reward_workers = 0
{rollout}
[engine]
max_num_seqs = 4
context_length = 64
[training]
threads = 1
[reporting]
output = "{output}"
"""


def recipe(directory: Path, task: str = "", rollout: str = "") -> Recipe:
    """Twenty records, of which the third has a prompt of 60 tokens; 48 fit."""
    policy = tiny.save(directory / "policy")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(policy)
    records = [{"prompt": "x" * (60 if i == 2 else 10) + str(i), "answer": "1"} for i in range(20)]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(task=task, rollout=rollout, output=directory / "run"))
    return load_recipe(path)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "",
            r"data.jsonl:3: its prompt has 61 tokens, more than the 48 .* \(1 of 18 prompts cannot be used; max",
        ),
        (
            'system_prompt = "Think."',
            r"data.jsonl:\d+: the chat template refuses .*: System role not supported \(18",
        ),
        (
            "template_arguments = {enable_thinking = false}",
            r"task.template_arguments.enable_thinking: .* not read",
        ),
    ],
)
async def test_unusable_prompts_stop_a_run_before_its_start(tmp_path: Path, task: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with open_trainer(recipe(tmp_path, task + "\nseed = 1")):
            raise AssertionError("the run has begun")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "rollout"), [('on_bad_record = "skip"', ""), ("", "max_prompt_length = 20")], ids=["skip", "limit"]
)
async def test_unusable_prompts_are_omitted_and_counted(
    tmp_path: Path, task: str, rollout: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_trainer(recipe(tmp_path, task + "\nseed = 1", rollout)) as trainer:
            assert trainer._rollout_metrics()["records_skipped"] == 1
    assert "1 of 18 prompts are left out" in caplog.text
    assert "few prompts are held out to evaluate on (2 of 20)" in caplog.text
