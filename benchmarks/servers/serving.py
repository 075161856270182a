"""What the benchmarks of this folder share: a small policy made from a config, and a real server on it.

`scripts/setup_vllm.sh` and `scripts/setup_sglang.sh` make the servers' environments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from record import save as save_record
from record import spread
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.engines.servers.launch import Launch, Server, launch_sglang, launch_vllm
from april.engines.servers.server import ServerEngine
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm

__all__ = ["CONNECT", "make_policy", "processor_seconds", "save", "spread", "start"]

ROOT = Path(__file__).parents[2]
CONTEXT = 2048
TICKS = os.sysconf("SC_CLK_TCK")
CONNECT: Mapping[str, Callable[..., Awaitable[ServerEngine]]] = {"vllm": connect_vllm, "sglang": connect_sglang}
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}


def make_policy(path: Path) -> Path:
    """A Qwen3 of 3.7M parameters in float32, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def start(
    engine: str, model: Path, log_dir: Path, slots: int, more: Sequence[str] = ()
) -> AbstractAsyncContextManager[Server]:
    """A server with one thread, and `more` options: the client has the other core."""
    python = Path(os.environ.get(f"APRIL_{engine.upper()}_PYTHON", ROOT / ".servers" / engine / "bin" / "python"))
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        arguments = [
            *("--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--block-size", "32"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(slots)),
            *("--kv-cache-memory-bytes", str(2**29)),
            *more,
        ]
        return launch_vllm(model, Launch(log_dir=log_dir, python=python, arguments=arguments, environment=environment))
    arguments = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-tokenizer-init", "--sleep-on-idle"),
        *("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", str(slots)),
        *("--max-total-tokens", "131072", "--mem-fraction-static", "0.1"),
        *more,
    ]
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return launch_sglang(model, Launch(log_dir=log_dir, python=python, arguments=arguments, environment=environment))


def processor_seconds(server: Server) -> float:
    """Of all processes of the server's group so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == server.process.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def save(script: str, engine: str, results: Mapping[str, Any]) -> Path:
    """Write `<script>_<engine>.json` into the script's folder."""
    return save_record(script, {engine: VERSIONS[engine], **results}, engine)
