"""vLLM's and SGLang's own classes read what april encodes for CUDA IPC, with files in the place of device memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from april.engines.cuda_ipc import exports_of, sglang_tensors, vllm_update
from tests.engines.ipc_files import SharedFiles
from tests.engines.test_cuda_ipc import CPU, weights
from tests.servers.conftest import python_of


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_servers_classes_read_the_tensors(kind: str, tmp_path: Path) -> None:
    shared, sent = SharedFiles(tmp_path), weights()
    buckets = exports_of(lambda: iter(sent.items()), CPU, 100, shared)
    body: list[Any]
    if kind == "vllm":
        body = [vllm_update(exported) for exported in buckets]
    else:
        body = [entry for exported in buckets for entry in sglang_tensors(exported, (shared.uuid,))]
    assert len(body) > 1
    (tmp_path / "body.json").write_text(json.dumps(body))
    out = tmp_path / "out.safetensors"
    script = Path(__file__).with_name("ipc_reader.py")
    command = [python_of(kind), script, kind, tmp_path / "body.json", out, shared.uuid]
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(out)
    assert found.keys() == sent.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in sent.items())
