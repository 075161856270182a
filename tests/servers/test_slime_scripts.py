"""slime's example scripts through its own `train.py` and `train_async.py`, on a real SGLang server, for three rollouts.

A test reads the script's own command line, adds the lines of april's page, and replaces sizes, paths and devices
only: `replaced`. slime's rollout manager, router, data and weight updates are its own; a stand-in trains in
the place of Megatron (tests/integrations/slime/script.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import requests
import torch
from benchmarks.launch_scripts.launch_settings import FORMATS
from benchmarks.launch_scripts.shell_reader import UNKNOWN, ShellScript
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integrations.slime.source import need_slime

SOURCE = need_slime()

from april.engines.servers.launch import Server  # noqa: E402
from tests import tiny  # noqa: E402
from tests.integrations.slime.cpu_actor import RECORD  # noqa: E402
from tests.servers.slime_server import start_sglang  # noqa: E402

ROOT = Path(__file__).parents[2]
N, G, OVER, STEPS = 4, 2, 8, 3
INCREMENTAL = "--sglang-incremental-streaming-output"
EXACT = 1e-4
"""Largest difference of log-probabilities between SGLang and Hugging Face, both in float32."""
SCRIPTS: dict[str, list[str]] = {
    "scripts/run-qwen3-4B.sh": ["--eval-interval", "2"],
    "examples/search-r1/run_qwen2.5_3B.sh": ["--rollout-max-context-len", "2500"],
    "examples/fully_async/run-qwen2.5-0.5B-fully_async.sh": [],
}
"""Sizes of the script's own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save(tmp_path_factory.mktemp("model"), num_hidden_layers=8, max_position_embeddings=4096)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with start_sglang(model, tmp_path_factory.mktemp("logs"), context=3000, tokens=32768) as server:
        yield server


def command(script: Path) -> tuple[str, list[str]]:
    """Return the program that a script starts, and its arguments."""
    given = {"NUM_GPUS": "2"}
    for words in ShellScript(script, given).commands:
        for index, word in enumerate(words):
            if re.fullmatch(r"train(_async)?\.py", word):
                # Values that a script computes, such as sizes of CUDA graphs, are unknown to the reader.
                return word, [argument for argument in words[index + 1 :] if argument != UNKNOWN]
    raise ValueError(f"{script} starts no training")


def replaced(folder: Path, model: Path, url: str) -> list[str]:
    """Return sizes, paths and devices of a run with a tiny model on a CPU; the last of two equal flags applies."""
    prompts = str(folder / "prompts.jsonl")
    shape = AutoConfig.from_pretrained(model)
    return [
        *("--num-layers", str(shape.num_hidden_layers), "--hidden-size", str(shape.hidden_size)),
        *("--ffn-hidden-size", str(shape.intermediate_size), "--num-attention-heads", str(shape.num_attention_heads)),
        *("--num-query-groups", str(shape.num_key_value_heads), "--kv-channels", str(shape.head_dim)),
        *("--vocab-size", str(shape.vocab_size), "--rotary-base", "10000"),
        *("--hf-checkpoint", str(model), "--ref-load", str(model), "--prompt-data", prompts),
        *("--load", str(folder / "checkpoint"), "--save", str(folder / "checkpoint"), "--save-interval", "1"),
        *("--eval-prompt-data", "held-out", f"{prompts}@[0:4]", "--eval-max-response-len", "20"),
        *("--n-samples-per-eval-prompt", "1", "--num-rollout", str(STEPS), "--rollout-batch-size", str(N)),
        *("--n-samples-per-prompt", str(G), "--over-sampling-batch-size", str(OVER)),
        *("--global-batch-size", str(N * G), "--rollout-max-response-len", "60"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"),
        *("--rollout-external-engine-addrs", url, "--sglang-device", "cpu"),
        *("--update-weight-transport", "disk", "--update-weight-disk-dir", str(folder / "weights")),
        *("--update-weight-disk-keep-files", "--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt")),
        *("--no-offload-train", "--no-offload-rollout"),
    ]


def prompt_file(path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"prompt {n} of many: "}],
            "label": str(n),
            "reward_model": {"ground_truth": {"target": [str(n)]}},
        }
        for n in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def errors(model: Path, sample: dict[str, Any]) -> torch.Tensor:
    """Return the difference of each trained token's log-probability from a policy's, shape [tokens]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
    with torch.no_grad():
        rows = policy(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
    exact = rows.gather(1, tokens[-length:, None])[:, 0]
    return (exact - torch.tensor(sample["rollout_log_probs"])).abs()[torch.tensor(sample["loss_mask"]).bool()]


def check_rollouts(folder: Path) -> None:
    """N groups of G in each, with log-probabilities of the weights that the servers had so far."""
    weights = sorted((folder / "weights").iterdir())
    assert len(weights) == STEPS + 1, "the first weights, and one update for each rollout"
    newer = resumed = False
    for rollout in range(STEPS):
        samples = torch.load(folder / f"rollout_{rollout}.pt", weights_only=False)["samples"]
        groups = Counter(sample["group_index"] for sample in samples)
        assert list(groups.values()) == [G] * N
        for sample in samples:
            off = torch.stack([errors(path, sample) for path in weights[: rollout + 1]]) > EXACT
            assert not off.all(0).any(), "a log-probability is of no policy so far"
            newer |= bool(off[0].any())
            resumed |= bool(off.any(1).all())
    assert newer, "no token is of updated weights: the test saw nothing"
    assert resumed, "no sample was interrupted and resumed: the test saw nothing"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_three_rollouts(tmp_path: Path, model: Path, server: Server, script: str) -> None:
    prompt_file(tmp_path / "prompts.jsonl")
    program, words = command(SOURCE / script)
    arguments = [*words, *FORMATS["slime"].lines, INCREMENTAL, *replaced(tmp_path, model, server.url), *SCRIPTS[script]]
    stand_ins = ROOT / "tests" / "integrations" / "slime" / "stand_ins"
    paths = [stand_ins, ROOT, ROOT / "src", SOURCE, (SOURCE / script).parent]
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, paths)),
        "SLIME_HOST_IP": "127.0.0.1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    runner = [sys.executable, "-m", "tests.integrations.slime.script", str(SOURCE / program)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [*runner, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log, process_group=0
        )
        try:
            code = run.wait(timeout=1500)
        finally:
            with suppress(ProcessLookupError):  # Ray's processes, if the run has failed
                os.killpg(run.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-8000:]

    steps = [json.loads(line) for line in (tmp_path / "checkpoint" / RECORD).read_text().splitlines()]
    assert [step["rollout"] for step in steps] == list(range(STEPS))
    assert [(step["samples"], step["updates"]) for step in steps] == [(N * G, 1)] * STEPS
    assert all(step["trained"] for step in steps)
    label = requests.get(f"{server.url}/model_info").json()["weight_version"]
    assert label == str(STEPS + 1), "the server has the last weights"
    check_rollouts(tmp_path)
    state = json.loads((tmp_path / "checkpoint" / "rollout" / f"april_{STEPS - 1}.json").read_text())
    assert state["scheduler"]["state"]["buffer"]["groups"], "no group is in flight"
