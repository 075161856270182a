"""AReaL's example scripts through its own entry point and single controller, with a tiny model, for three steps.

APRIL_AREAL_SOURCE names a checkout of AReaL 1.0.4 (scripts/setup_areal.sh). A test reads the example's own file of
settings and replaces sizes, paths, devices and limits of time (`REPLACED`). The policy often draws the answer, so that
the rewards of the example's own function differ.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("areal", reason="AReaL is not installed here: scripts/setup_areal.sh")
if "APRIL_AREAL_SOURCE" not in os.environ:
    pytest.skip("AReaL's examples come from its source: set APRIL_AREAL_SOURCE", allow_module_level=True)

from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests import tiny
from tests.integrations.areal.controller import WEIGHTS

SOURCE = Path(os.environ["APRIL_AREAL_SOURCE"]).absolute()
ROOT = Path(__file__).parents[3]
BATCH, GROUP, STEPS = 4, 4, 3
ANSWER = "1"
"""Of every question."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>\n{% endfor %}"
WORKER = {"task_type": "worker", "port_count": 2, "gpu": 0, "mem": 1, "cmd": "python3 -m areal.infra.rpc.rpc_server"}
REPLACED: dict[str, Any] = {
    "cluster.fileroot": "{folder}/runs",
    "cluster.name_resolve.nfs_record_root": "{folder}/names",
    "train_dataset.path": "{folder}/gsm8k",
    "valid_dataset.path": "{folder}/gsm8k",
    "actor.path": "{folder}/model",
    "rollout.backend": "sglang:d1",
    "actor.backend": "fsdp:d1",
    "actor.scheduling_spec": [{**WORKER, "env_vars": {}}],
    "actor.dtype": "float32",
    "actor.attn_impl": "sdpa",
    "actor.mb_spec.n_mbs": BATCH * GROUP,  # a sequence each: torch's attention does not separate packed sequences
    "actor.weight_update_mode": "disk",  # NCCL needs GPUs
    "train_dataset.batch_size": BATCH,
    "valid_dataset.batch_size": BATCH,
    "train_dataset.num_workers": 1,
    "valid_dataset.num_workers": 1,
    "train_dataset.setup_timeout": 1200,  # the data service starts slowly, on a busy machine
    "valid_dataset.setup_timeout": 1200,
    "gconfig.max_new_tokens": 40,
    "sglang.context_length": 1000,
    "total_train_steps": STEPS,
}
"""Settings of a run with a tiny model on a CPU."""
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "math/gsm8k_grpo.yaml": ("math/gsm8k_rl.py", {}),
    "math/gsm8k_grpo_lora.yaml": ("math/gsm8k_rl.py", {}),
    "math/gsm8k_dapo_dynamic_bs.yaml": ("math/gsm8k_rl.py", {"actor.overlong_tokens": 16}),
    "multi_turn_math/gsm8k_grpo_mt.yaml": ("multi_turn_math/gsm8k_rl_mt.py", {}),
}
"""The script of each file of settings, and sizes of its own."""


def prepare(folder: Path) -> None:
    """The model, which often draws the answer, and questions in the form of gsm8k."""
    tokenizer = tiny.tokenizer()
    policy = tiny.model()
    # The output layer, too. All tokens share a direction: tokens of an answer have more of it, end tokens have none.
    weight, shared = policy.get_input_embeddings().weight.data, policy.config.hidden_size**-0.5
    answers = tokenizer.convert_tokens_to_ids([ANSWER, " "])
    ends = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    weight += 0.3 * shared
    weight[answers] += 1.5 * shared
    weight[ends] -= 0.3 * shared
    policy.save_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    data = folder / "gsm8k"
    data.mkdir()
    names = {"train": range(16), "test": range(100, 106)}
    for name, numbers in names.items():
        rows = [{"question": f"{n}?", "answer": f"#### {ANSWER}"} for n in numbers]
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [{"split": name, "path": f"{name}.jsonl"} for name in names]
    (data / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'main', 'data_files': files}])}\n---\n"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_three_steps(tmp_path: Path, name: str) -> None:
    prepare(tmp_path)
    script, more = EXAMPLES[name]
    settings = OmegaConf.load(SOURCE / "examples" / name)
    for path, value in {**REPLACED, **more}.items():
        text = value.format(folder=tmp_path) if isinstance(value, str) else value
        OmegaConf.update(settings, path, text, force_add=True)
    OmegaConf.save(settings, tmp_path / "settings.yaml")
    record = tmp_path / "record.json"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{SOURCE}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "APRIL_RECORD": str(record),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),  # which would otherwise hold another test's data set of the name
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("AREAL_SPMD_MODE", None)
    runner = [sys.executable, "-m", "tests.integrations.areal.example", str(SOURCE / "examples" / script)]
    words = ["--config", str(tmp_path / "settings.yaml"), "scheduler.type=local"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen([*runner, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            code = run.wait(timeout=1500)
        finally:
            with suppress(ProcessLookupError):  # AReaL's workers, if the run has failed
                os.killpg(run.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-8000:]

    steps = json.loads(record.read_text())
    assert [step["version"] for step in steps] == list(range(STEPS))
    bound = settings.rollout.max_head_offpolicyness
    for step in steps:
        assert step["groups"] == [GROUP] * BATCH
        assert step["staleness"] <= bound
        assert set(step["versions"]) <= set(range(step["version"] + 1))
        assert step["rows"] >= GROUP * BATCH
    if "multi_turn" in name:
        assert any(turns > 1 for step in steps for turns in step["turns"])
    assert steps[0]["difference"] < 1e-4, "the trainer computes other log-probabilities"
    loads = [load_file(path) for path in sorted((tmp_path / WEIGHTS).iterdir())]
    assert len(loads) >= STEPS, "servers load the weights of every step"
    first = load_file(tmp_path / "model" / "model.safetensors")
    moved = max(float((loads[-1][name] - value).abs().max()) for name, value in first.items() if name in loads[-1])
    assert moved > settings.actor.optimizer.lr / 2, "the policy was not trained: weight decay alone moves it less"
