"""Which GPUs a process may use, and how it names them to the processes that it starts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from april.engines import gpus
from april.engines.gpus import Gpu, chosen, installed, variables_for, visible
from april.rollout.engine import EngineError
from tests.gpus import install

FOUR = [Gpu(str(i), i, f"GPU-{i}aaaa-bbbb") for i in range(4)]
AMD = [Gpu(str(i), i, f"GPU-{i}f00", rocm=True) for i in range(4)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        ("GPU-3aaaa,GPU-1", ["GPU-3aaaa", "GPU-1"]),
        ("1, 3", ["1", "3"]),
        ("1,9,2", ["1"]),
        ("0,-1,2", ["0"]),
        ("", []),
        ("-1", []),
        ("1,1", []),
        ("1,GPU-1aaaa", []),
        ("MIG-GPU-8932/7/0", ["MIG-GPU-8932/7/0"]),
    ],
)
def test_visible_devices_of_the_environment_limit_the_gpus(variable: str | None, expected: list[str]) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert [gpu.id for gpu in chosen(FOUR, environment)] == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["2"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
    ],
)
def test_rocm_renumbers_the_visible_devices(environment: dict[str, str], expected: list[str]) -> None:
    found = chosen(AMD, environment)
    assert [gpu.id for gpu in found] == expected
    if environment.get("ROCR_VISIBLE_DEVICES"):
        assert {gpu.uuid for gpu in found} <= {"GPU-2f00", "GPU-3f00"}
    ids = ",".join(expected)
    assert variables_for(found, rocm=True) == {"CUDA_VISIBLE_DEVICES": ids, "HIP_VISIBLE_DEVICES": ids}


def test_gpus_and_their_instances_are_counted_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 3, instances=[1])
    assert [gpu.id for gpu in visible()] == ["0", "MIG-10cc", "MIG-12cc", "2"]
    assert (visible()[0].total, visible()[0].free) == (80 * 10**9, 60 * 10**9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-12cc")
    assert [gpu.id for gpu in visible()] == ["MIG-12cc"]
    install(monkeypatch, 3, driver=False)
    assert not visible()


def test_amd_gpus_are_counted_by_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    smi = SimpleNamespace(
        AmdSmiException=RuntimeError,
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a", "b"],
        amdsmi_get_gpu_asic_info=lambda handle: {"asic_serial": "0xF0A", "market_name": "MI300X"},
        amdsmi_get_gpu_vram_usage=lambda handle: {"vram_total": 1000, "vram_used": 400},
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    assert installed()[1] == Gpu("1", 1, "GPU-f0a", "MI300X", 1000 << 20, 600 << 20, rocm=True)


def test_a_driver_without_its_python_package_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", SimpleNamespace(exists=lambda: True))
    with pytest.raises(EngineError, match="pip install nvidia-ml-py"):
        visible()
