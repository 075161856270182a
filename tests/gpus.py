"""A simulated machine with GPUs: the answers of NVML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """As of pynvml."""


def install(monkeypatch: pytest.MonkeyPatch, count: int, instances: Sequence[int] = (), driver: bool = True) -> None:
    """Have this process find `count` GPUs of 80 GB, of which 20 are held; those in `instances` are in MIG mode, in two
    parts of the places 0 and 2."""

    def part_of(gpu: int, place: int) -> Any:
        if place not in (0, 2):
            raise NVMLError("not found")
        return gpu, place

    def mode(gpu: int) -> tuple[int, int]:
        if gpu == 0 and not instances:
            raise NVMLError("not supported")
        return int(gpu in instances), int(gpu in instances)

    def init() -> None:
        if not driver:
            raise NVMLError("driver not loaded")

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda gpu: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=part_of,
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}aaaa-bbbb" if isinstance(h, int) else f"MIG-{h[0]}{h[1]}cc",
        nvmlDeviceGetName=lambda h: "NVIDIA H100",
        nvmlSystemGetCudaDriverVersion=lambda: 13000,
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=80 * 10**9, free=60 * 10**9, used=20 * 10**9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
