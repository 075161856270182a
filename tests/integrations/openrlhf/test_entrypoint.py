"""Three of OpenRLHF's example scripts through its own entry point, with a tiny model, for three steps.

The flags of april's page follow a script's flags, and then replacements of sizes, paths and devices: `TINY` for every
script. Flags in `GPU` have no other value, and are left out. Stand-ins for calls that need a GPU are in `on_cpu.py`,
and for vLLM and flash-attn in `stand_ins`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed here: scripts/setup_openrlhf.sh")

import ray
import torch

from tests import tiny
from tests.integrations.openrlhf.scripts import SCRIPTS
from tests.integrations.restart import own_ray

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BATCH = 4
STEPS = 3
GPU = ("--ds.packing_samples", "--train.dynamic_batch_enable")
"""Flags that need flash attention."""
APRIL = """
--april.over_sampling_batch_size 7
--april.max_staleness 2
--algo.advantage.is_correction_level token
"""
"""Flags of april's page."""
TINY = f"""
--rollout.batch_size {BATCH}
--rollout.n_samples_per_prompt 3
--train.batch_size {3 * BATCH}
--train.micro_batch_size 3
--rollout.micro_batch_size 3
--data.max_len 64
--rollout.max_new_tokens 40
--data.max_samples 100
--data.input_key question
--data.label_key answer
--data.dataloader_num_workers 0
--ckpt.save_steps 1
--ref.num_gpus_per_node 1
--actor.num_gpus_per_node 1
--vllm.num_engines 1
--vllm.tensor_parallel_size 1
--vllm.sync_backend gloo
--ds.ring_attn_size 1
--ds.attn_implementation eager
--actor.adam.lr 1e-3
"""
SCORE = "(1 + len(text) % 3) / 4"
"""Between 0 and 1, so that the scripts' filter accepts every group, and the number of steps is known."""
REWARD = f"""
import torch

def reward_func(queries, prompts, labels, **kwargs):
    reward = torch.tensor([{SCORE} for text in queries])
    return {{"rewards": reward, "scores": reward, "extra_logs": {{"dummy_scores": reward}}}}
"""
AGENT = f"""
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {{"observation": states["observation"]}}

    async def step(self, states, **kwargs):
        self.turns += 1
        text, done = states["action_text"], self.turns == 1 + int(states["label"]) % 3
        reward = torch.tensor({SCORE})
        return {{"rewards": reward, "scores": reward, "environment_feedback": "!" if done else " more: ", "done": done,
                "sampling_params": states["sampling_params"], "extra_logs": {{"turns": self.turns}}}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def modules() -> str:
    """Module path of each process of a run."""
    return ":".join(map(str, (HERE.with_name("cpu_site"), HERE / "stand_ins", ROOT, ROOT / "src")))


@pytest.fixture(scope="module")
def address(modules: str) -> Iterator[str]:
    """A Ray whose processes begin with the stand-ins."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", modules)
        patched.setenv("RAY_prestart_worker_first_driver", "0")
        patched.setenv("TORCHDYNAMO_DISABLE", "1")  # compiled kernels
        with own_ray(HERE / "stand_ins"):
            yield ray.get_runtime_context().gcs_address


def save(folder: Path) -> None:
    """A policy with a chat template, a data set of three batches, and the user's code."""
    tiny.save(folder / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts").mkdir()
    numbers = range(STEPS * BATCH)
    rows = [json.dumps({"question": [{"role": "user", "content": f"{n}?"}], "answer": str(n)}) for n in numbers]
    (folder / "prompts" / "train.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_three_steps(address: str, modules: str, tmp_path: Path, script: str) -> None:
    save(tmp_path)
    paths = {
        "--actor.model_name_or_path": "model",
        "--data.prompt_dataset": "prompts",
        "--ckpt.output_dir": "final",
        "--ckpt.path": "checkpoints",
        "--reward.remote_url": "reward.py",
        "--train.agent_func_path": "agent.py",
        "--logger.tensorboard_dir": "runs",
    }
    flags = [word for word in SCRIPTS[script].split() if word not in GPU]
    flags += [*APRIL.split(), *TINY.split()]
    for flag, name in paths.items():
        flags += [flag, str(tmp_path / name)] if flag in flags else []
    done = launch(flags, address, modules, tmp_path)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-6000:]
    (saved,) = (tmp_path / "checkpoints" / "_actor" / f"global_step{STEPS}").glob("*model_states.pt")
    state = json.loads(torch.load(saved, weights_only=False)["april"])["scheduler"]["state"]
    assert state["trainer_version"] == STEPS
    in_flight = state["buffer"]["groups"]
    assert in_flight, "no group is in flight"
    assert state["buffer"]["admitted"] - len(in_flight) == STEPS * BATCH
    steps = logs_of(done.stdout + done.stderr)
    assert list(steps) == [*range(1, STEPS + 1)]
    assert all(logs["actor_grad_norm"] > 0 for logs in steps.values())
    assert abs(steps[1]["vllm_kl"]) < 1e-2, "no token of the first step is of another policy"
    assert steps[STEPS]["kl"] > 0, "the policy has left the reference"


def launch(flags: list[str], address: str, modules: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start a run as a user does, and wait for its end."""
    variables = {"RAY_ADDRESS": address, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "april.integrations.openrlhf", *flags]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)


def test_a_response_that_leaves_no_prompt_is_refused_before_actors_start(
    address: str, modules: str, tmp_path: Path
) -> None:
    flags = [word for word in next(iter(SCRIPTS.values())).split() if word not in GPU]
    flags += [*APRIL.split(), *TINY.split(), "--rollout.max_new_tokens", "64"]  # no model and no data are there
    done = launch(flags, address, modules, tmp_path)
    assert done.returncode
    refusal = "ValueError: --rollout.max_new_tokens = 64: --data.max_len limits prompt and response together"
    assert done.stderr.strip().splitlines()[-1].startswith(refusal), done.stderr[-2000:]


def logs_of(output: str) -> dict[int, dict[str, float]]:
    """The logs of each step, from OpenRLHF's lines on the console."""
    return {int(number): ast.literal_eval(logs) for number, logs in re.findall(r"Global step (\d+): ({.*})", output)}
