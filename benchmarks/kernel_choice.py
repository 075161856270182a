"""Which attention kernel a CUDA build of PyTorch chooses for april's shapes, asked without a GPU.

A stub of CUDA's runtime (`cuda_stub.c`, a C compiler is needed) reports an H100 or an A100 and executes nothing. Each
question is asked twice: of `scaled_dot_product_attention` alone, and of the call that april makes (`kernels.attend`).
PyTorch's kernel for packed sequences is called as april calls it, so that its checks of arguments run; results and
speed cannot be seen this way.

    python3.11 -m venv /tmp/cuda && /tmp/cuda/bin/pip install torch==2.14.1    # about 5.5 GB
    python benchmarks/kernel_choice.py --python /tmp/cuda/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "src" / "april" / "engines" / "kernels.py"
DEVICES = {"H100": "9.0", "A100": "8.0"}
HEADS, KV_HEADS, SIZE = 16, 8, 128
"""Qwen3-0.6B's."""


def questions() -> dict[str, dict[str, Any]]:
    """Queries [batch, heads, queries, size] and keys of each kind of call; `mask` if it has one."""
    return {
        "training": {"query": (2, HEADS, 4096), "key": (2, KV_HEADS, 4096), "grad": True},
        "training with a window": {"query": (2, HEADS, 4096), "key": (2, KV_HEADS, 4096), "mask": (1, 1), "grad": True},
        "prefill": {"query": (4, HEADS, 256), "key": (4, KV_HEADS, 256)},
        "resumed prefill": {"query": (1, HEADS, 1024), "key": (1, KV_HEADS, 8192), "mask": (1, 1)},
        "decode": {"query": (64, KV_HEADS, HEADS // KV_HEADS), "key": (64, KV_HEADS, 2048), "mask": (64, 1)},
    }


def answer() -> dict[str, Any]:
    """The answers of the PyTorch that runs this, on the device that the stub reports."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend
    from torch.overrides import TorchFunctionMode

    spec = importlib.util.spec_from_file_location("kernels", KERNELS)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = kernels
    spec.loader.exec_module(kernels)
    backends = {int(backend): name for name, backend in SDPBackend.__members__.items()}
    chosen: list[str] = []

    class Asked(TorchFunctionMode):
        """Queries which kernel a call would use, in place of the call."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not F.scaled_dot_product_attention:
                return func(*args, **(kwargs or {}))
            options = {name: value for name, value in kwargs.items() if name not in ("attn_mask", "is_causal")}
            call = (*args, kwargs.get("attn_mask"), 0.0, kwargs.get("is_causal", False))
            chosen.append(backends[torch._fused_sdp_choice(*call, **options)])
            return args[0]

    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, asked in questions().items():
            grad = asked.get("grad", False)
            query = torch.empty(*asked["query"], SIZE, dtype=dtype, device="cuda", requires_grad=grad)
            key = torch.empty(*asked["key"], SIZE, dtype=dtype, device="cuda", requires_grad=grad)
            mask = None
            if "mask" in asked:
                mask = torch.empty(*asked["mask"], query.shape[2] if name != "decode" else 1, key.shape[2], dtype=dtype)
                mask = mask.to("cuda")
            with Asked():
                gqa = query.shape[1] != key.shape[1]
                F.scaled_dot_product_attention(
                    query, key, key, attn_mask=mask, is_causal=mask is None, scale=None, enable_gqa=gqa
                )
                kernels.attend(query, key, key, mask, None, None)
            alone, april = chosen[-2:]
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = {"PyTorch alone": alone, "april": april}
    found["packed sequences"] = packed(kernels)
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "kernels": found}


def packed(kernels: Any) -> dict[str, str]:
    """Whether PyTorch's kernel for packed sequences accepts april's arguments."""
    import torch

    def int32(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to("cuda")

    def tensor(tokens: int, heads: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        return torch.empty(tokens, heads, SIZE, dtype=dtype, device="cuda", requires_grad=grad)

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        train = kernels.Bounds(int32(0, 700, 1000), int32(0, 700, 1000), 700, 700)
        # Sequences of the cache are rows of one KV head each, in any order: two that decode, one that prefills.
        cache = kernels.Bounds(int32(0, 1, 2, 34), int32(4096, 0, 2048, 8192), 32, 1024, int32(1000, 7, 1024))
        group = HEADS // KV_HEADS
        for name, bounds, (q, k), grad in (
            ("training", train, (tensor(1000, HEADS, dtype, True), tensor(1000, KV_HEADS, dtype, True)), True),
            ("KV cache", cache, (tensor(34, group, dtype), tensor(8192, 1, dtype)), False),
        ):
            for window in (None, 512):
                kind = f"{name}{', window' if window else ''}, {str(dtype).removeprefix('torch.')}"
                try:
                    out = kernels.torch_varlen()(q, k, k, bounds, None, window, None)
                    if grad:
                        out.sum().backward()
                    found[kind] = "accepted"
                except Exception as error:  # the answer
                    found[kind] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def build(python: str, folder: Path) -> Path:
    """Compile the stub against the headers and the names of the runtime that `python`'s PyTorch uses."""
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", script], check=True, text=True, capture_output=True).stdout.strip())
    (runtime,) = packages.glob("nvidia/cu*/lib/libcudart.so.*")
    includes = [runtime.parents[1] / "include", packages / "triton" / "backends" / "nvidia" / "include"]
    listed = subprocess.run(["nm", "-D", "--defined-only", runtime], check=True, text=True, capture_output=True).stdout
    names = set(re.findall(r" T (\w+)", listed))
    names -= set(re.findall(r"\b(cuda\w+)(?=[,(])", (HERE / "cuda_stub.c").read_text()))
    driver = set(re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", "".join((path / "cuda.h").read_text() for path in includes)))
    for name, functions in (("runtime.c", names), ("driver.c", driver)):
        text = "".join(f"int {function}(void) {{ return 0; }}\n" for function in sorted(functions))
        (folder / name).write_text(text)
    (folder / "versions").write_text(f"{runtime.name} {{ global: *; }};\n")
    own = ["-Wl,-soname," + runtime.name, f"-Wl,--version-script={folder / 'versions'}"]
    compiler = ["cc", "-shared", "-fPIC", "-w", "-O1", *(f"-I{path}" for path in includes)]
    sources = [folder / "runtime.c", HERE / "cuda_stub.c"]
    subprocess.run([*compiler, *own, "-o", folder / runtime.name, *sources], check=True)
    subprocess.run([*compiler, "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return folder / runtime.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter with a CUDA build of PyTorch")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        print(json.dumps(answer()))
        return
    if args.python is None:
        parser.error("--python is missing: name an interpreter with a CUDA build of PyTorch")
    from record import save

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        runtime = build(args.python, Path(folder))
        for device, capability in DEVICES.items():
            stub = {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": folder, "CUDA_STUB_CAPABILITY": capability}
            command = [args.python, "-W", "ignore", __file__, "--answer"]
            done = subprocess.run(
                command, check=True, text=True, stdout=subprocess.PIPE, env=os.environ | stub, timeout=300
            )
            results[device] = json.loads(done.stdout.splitlines()[-1])
            print(device, json.dumps(results[device], indent=2), flush=True)
    print("saved", save(__file__, results))


if __name__ == "__main__":
    main()
