"""Example scripts of a TRL checkout, with the lines of april's page, on tiny models and data sets.

APRIL_TRL_SOURCE names the checkout. A script runs in a folder that contains each model and data set under its name on
the Hugging Face hub, so that nothing is fetched and nothing of the script changes but the lines that `EDITS` names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.integrations.trl.checkpoint import STATE
from tests.integrations.trl.suite import tiny_hub
from tests.limits import HANG

SOURCE = Path(os.environ.get("APRIL_TRL_SOURCE", "")) / "examples" / "scripts"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("APRIL_TRL_SOURCE" not in os.environ, reason="set APRIL_TRL_SOURCE to a checkout of TRL"),
    pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify (scripts/setup_trl.sh)"),
]
ROOT = Path(__file__).parents[3]
STEPS = 3
OUTPUT = "trained"
APRIL = "from april.integrations.trl import GRPOTrainer, PartialRollouts\n"
ROLLOUTS = "partial_rollouts=PartialRollouts(over_sampling_batch_size=6, max_num_seqs=24, stream_interval=2),"
"""Lines of april's page."""
TINY = f"""--output_dir {OUTPUT} --max_steps {STEPS} --save_steps {STEPS} --logging_steps 1 --report_to none --use_cpu
--bf16 False --dtype float32 --gradient_checkpointing False --max_completion_length 48 --num_generations 4
--per_device_train_batch_size 4 --gradient_accumulation_steps 2"""
"""Replacements of paths, sizes and devices, after a script's arguments."""
ARGUMENTS = {
    "gspo.py": "--model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5 --use_peft "
    "--lora_target_modules q_proj v_proj --log_completions --importance_sampling_level sequence --epsilon 3e-4 "
    "--epsilon_high 4e-4 --beta 0.0 --loss_type grpo --steps_per_generation 2",
    "grpo_agent.py": "--model_name_or_path Qwen/Qwen3-1.7B",
    "grpo_continuous_batching.py": "--model_name_or_path Qwen/Qwen3-1.7B --use_peft --log_completions",
}
"""Arguments in a script's documentation. `grpo_agent.py` trains with `vllm_mode = "colocate"` and pushes to the hub
there, and prints completions, which TRL 1.16 cannot do if a tool returns rows (`print_prompt_completions_sample`)."""
EDITS = {
    "grpo_2048.py": {
        'report_to="trackio"': f'report_to="none", output_dir="{OUTPUT}", max_steps={STEPS}, save_steps={STEPS}',
        'trackio_space_id="trl-2048"': "use_cpu=True, bf16=False, gradient_checkpointing=False, num_generations=4",
        "max_completion_length=2048": "max_completion_length=400",
    },
    "grpo_agent.py": {"with timeout(5):": "if True:  # without a signal, which only the main thread may set"},
}
"""`TINY` for a script that takes no arguments (trackio is a service on the hub), and changes that april's page asks
for."""
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
CALLS = [
    *(CALL.format("move", "direction", direction) for direction in ("up", "left")),
    CALL.format("query_biogrid", "sql_command", "SELECT * FROM interactions WHERE Gene = 'A'"),
    CALL.format("query_biogrid", "sql_command", "SELECT nothing"),
]
OFTEN = {
    "gspo.py": ["\\boxed{4}"],
    "grpo_2048.py": CALLS[:2],
    "grpo_agent.py": CALLS[2:],
    "grpo_continuous_batching.py": ["#### 4"],
}
"""Texts, of one token each, on which the rewards of a script depend."""


def save_model(folder: Path, often: list[str]) -> None:
    """Save a policy whose tokens hardly depend on those before them: a fifth ends the turn, and more are in `often`."""
    words = tiny_hub.tokenizer("qwen3.jinja", 320, [*tiny_hub.WORDS, *often])
    shape = {**tiny_hub.SHAPE, "vocab_size": 320, "hidden_size": 16, "head_dim": 4, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0  # 4 after the last norm
        for token in ("<|im_end|>", *often):
            model.lm_head.weight[words.convert_tokens_to_ids(token), 0] = 5.0 / 4
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def save_rows(folder: Path, rows: list[dict[str, Any]], config: str = "default") -> None:
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        Dataset.from_list(rows).to_parquet(folder / f"{part}.parquet")
    files = [{"split": part, "path": f"{part}.parquet"} for part in ("train", "test")]
    head = {"configs": [{"config_name": config, "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")


def save_hub(folder: Path, script: str) -> None:
    """Save what the scripts load from the hub."""
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"):
        save_model(folder / "Qwen" / name, OFTEN[script])
    numbers = range(400)
    problems = [{"problem": f"{n}?", "solution": "$4$", "messages": []} for n in numbers]
    save_rows(folder / "AI-MO" / "NuminaMath-TIR", problems)
    save_rows(
        folder / "openai" / "gsm8k", [{"question": f"{n}?", "answer": "So. #### 4"} for n in numbers], config="main"
    )
    save_rows(folder / "qgallouedec" / "biogrid", [{"Gene": name, "Score": 1.0} for name in "ABC"])
    questions = [{"question": f"Does the gene {n}?", "answer": ("yes", "no")[n % 2]} for n in numbers]
    save_rows(folder / "qgallouedec" / "biogrid_qa", questions)


def with_april(script: str) -> str:
    """Return a script of the checkout with april's lines and with those of `EDITS`."""
    text = (SOURCE / script).read_text()
    for old, new in EDITS.get(script, {}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    text, imports = re.subn(r"^    GRPOTrainer,\n|(?<=GRPOConfig), GRPOTrainer", "", text, flags=re.MULTILINE)
    text, calls = re.subn(r"= GRPOTrainer\(", f"= GRPOTrainer({ROLLOUTS}", text)
    assert imports == calls == 1
    return text.replace("from trl import", f"{APRIL}from trl import", 1)


def run(folder: Path, script: str) -> tuple[list[dict[str, float]], str]:
    """Train `STEPS` steps. Return the logged metrics of each, and what the script wrote."""
    save_hub(folder, script)
    (folder / script).write_text(with_april(script))
    arguments = f"{ARGUMENTS[script]} {TINY}".split() if script in ARGUMENTS else []
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "home"),
            "TRL_EXPERIMENTAL_SILENCE": "1",
        },
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((folder / OUTPUT / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert (folder / OUTPUT / f"checkpoint-{STEPS}" / STATE).exists()
    return [entry for entry in state["log_history"] if "loss" in entry], done.stdout + done.stderr


IGNORED = {"grpo_continuous_batching.py": "use_transformers_continuous_batching = True is ignored"}
REWARDS = {
    "gspo.py": "rewards/accuracy_reward/mean",
    "grpo_2048.py": "rewards/reward_score/mean",
    "grpo_agent.py": "rewards/query_reward/mean",
    "grpo_continuous_batching.py": "rewards/correctness_reward/mean",
}


@pytest.mark.parametrize("script", REWARDS)
def test_scripts_train_three_steps(tmp_path: Path, script: str) -> None:
    logs, written = run(tmp_path, script)
    assert [entry["april/policy_version"] for entry in logs] == list(range(STEPS))
    assert sum(entry["april/samples_resumed"] for entry in logs) > 0
    assert max(entry["april/staleness_max"] for entry in logs) > 0
    assert any(entry[REWARDS[script]] for entry in logs)
    assert any(entry["reward_std"] > 0 and entry["grad_norm"] > 0 for entry in logs)
    assert ("is ignored" in written) == (script in IGNORED)
    assert IGNORED.get(script, "") in written
    peft = "--use_peft" in ARGUMENTS.get(script, "") or script == "grpo_2048.py"
    assert (tmp_path / OUTPUT / f"checkpoint-{STEPS}" / "adapter_model.safetensors").exists() == peft
    if script in ("grpo_2048.py", "grpo_agent.py"):
        assert any(entry["tools/call_frequency"] > 0 for entry in logs)
        assert any(entry["tools/failure_frequency"] < 1 for entry in logs if entry["tools/call_frequency"] > 0)
