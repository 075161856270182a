"""Stand-ins for the parts of CUDA that Megatron uses, on a machine without a GPU.

Tensors that are to be moved to a GPU stay on the CPU, and `transformer_engine`, which the bridge imports without a
check, is a package whose every name is an empty module. Megatron's own layers compute (`get_gpt_layer_local_spec`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

STUBS = {"transformer_engine", "transformer_engine_torch"}


class OnCPU(TorchFunctionMode):
    """Execute GPU operations inside the context on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything(name, (torch.nn.Module,), {})


class _Stub(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """For the rest of this process; before the bridge is imported, and after Megatron-Core is."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init", "manual_seed"):
        setattr(cuda, name, lambda *_, **__: None)
    OnCPU().__enter__()
    for name in ("models.gpt", "extensions", "transformer", "optimizer", "distributed"):
        importlib.import_module(f"megatron.core.{name}")
    from megatron.core import tensor_parallel

    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    tensor_parallel.random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None
    sys.meta_path.append(_Finder())
