"""The recipes of examples/paper fit their GPUs, read records with the columns of their data sets, and train tiny
models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from april.commands.main import run
from april.config.checking import check_recipe
from april.config.reading import load_recipe
from april.tasks.build import build_task
from tests import tiny

PAPER = Path(__file__).parent.parent / "examples" / "paper"
QUESTION = "What is 3 + {}?"
RECORDS: dict[str, Any] = {
    "BytedTsinghua-SIA/DAPO-Math-17k": lambda i: {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": QUESTION.format(i % 6)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(3 + i % 6), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i:08x}"},
    },
    "agentica-org/DeepScaleR-Preview-Dataset": lambda i: {
        "problem": QUESTION.format(i),
        "answer": str(3 + i),
        "solution": "Count.",
    },
    "zwhe99/DeepMath-103K": lambda i: {
        "question": QUESTION.format(i),
        "final_answer": str(3 + i),
        "difficulty": 5.0,
        "topic": "Mathematics -> Algebra",
        **{f"r1_solution_{k}": "Count." for k in (1, 2, 3)},
    },
}
"""Record i in the columns that each data set has."""
ARCHITECTURES: dict[str, type[PreTrainedConfig]] = {
    "Qwen/Qwen3-4B": Qwen3Config,
    "Qwen/Qwen3-8B": Qwen3Config,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Qwen2Config,
    "zai-org/GLM-4-9B-0414": Glm4Config,
}
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
RECIPES = sorted(PAPER.glob("*.toml"), key=lambda path: path.name)


def records(recipe: Any, path: Path) -> str:
    rows = [RECORDS[recipe.task.path](i) for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_the_columns_its_data_set_has_and_trains_its_architecture(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    check_recipe(recipe)
    data = records(recipe, tmp_path / "data.jsonl")
    task = build_task(dataclasses.replace(recipe.task, path=data, eval_size=1))
    assert task.score(task.problem(0), r"So it is \boxed{" + str(task.problem(0).answer) + "}.") == 1.0
    assert task.correct is not None
    assert len(task) == (5 if recipe.task.unique_prompts else 11)
    torch.manual_seed(0)
    config = ARCHITECTURES[recipe.model.path](**tiny.SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    small = {
        "model.path": tmp_path / "model",
        "model.compute-dtype": "float32",
        "task.path": data,
        "task.eval-size": 1,
        "engine": "embedded",
        "replicas": 1,
        "weight-transfer": "disk",
        "processes": 1,
        "overlap": False,
        "max-num-seqs": 8,
        "context-length": 256,
        "rollout-batch-size": 2,
        "over-sampling-batch-size": 3,
        "n-samples-per-prompt": 2,
        "max-response-length": 8,
        "max-prompt-length": 200,
        "reward-workers": 0,
        "steps": 1,
        "eval-interval": 0,
        "eval-samples": 1,
        "threads": 1,
        "output": tmp_path / "run",
    }
    flags = [str(part) for name, value in small.items() for part in (f"--{name}", value)]
    assert run(["train", str(path), *flags, "--dynamic-sampling", "False"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dry_run_accepts_a_recipe_on_its_gpus(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server on the trainer's GPU, or parameters in bfloat16, would not run or not train."""
    recipe = load_recipe(path)
    assert recipe.model.dtype == "float32"
    assert recipe.model.compute_dtype == "bfloat16"
    gpus = recipe.trainer.processes + len(recipe.engines_here)
    assert gpus == (1 if recipe.engine.engine == "embedded" else 8)
    assert run(["check", str(path), "--gpus", str(gpus), "--gpu-memory", "80"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": fits") == 3
    assert printed.count("trains") == recipe.trainer.processes
    assert "unused" not in printed
    assert f"prompt from {recipe.task.prompt_column!r}" in printed
