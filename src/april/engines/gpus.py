"""The GPUs of this machine, by NVML or AMD SMI: counting them starts no context on any of them.

Invariant: a GPU's id is its name in the visibility variables of a process that this one starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from april.rollout.engine import EngineError

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
HIDDEN = "-1"
"""What the visibility variables name where a process is to see no GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one in MIG mode.

    Args:
        id: its name in CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES: a number or a UUID.
        number: number of the whole GPU, in the driver's order.
        uuid: UUID of the GPU or the instance; empty if it is not known.
        name: product name.
        total: bytes of memory; 0 if the driver does not report it.
        free: bytes of unused memory.
        rocm: whether it is an AMD GPU, for ROCm.
    """

    id: str
    number: int = -1
    uuid: str = ""
    name: str = ""
    total: int = 0
    free: int = 0
    rocm: bool = False

    def __str__(self) -> str:
        return f"GPU {self.id}{f' ({self.name})' if self.name else ''}"


def visible(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that this process may use, in the order in which torch numbers them.

    Raises:
        EngineError: there is an NVIDIA driver, but the package that queries it is not installed.
    """
    return chosen(installed(), environment)


def installed() -> list[Gpu]:
    """All GPUs of this machine."""
    return _nvidia() or _amd()


def used_bytes(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return the memory that all processes together hold now, of each of these GPUs by its id."""
    now = {gpu.uuid or gpu.number: gpu for gpu in installed()}
    found = ((gpu.id, now.get(gpu.uuid or gpu.number)) for gpu in gpus)
    # A GPU that shares its memory with a CPU reports none.
    return {id: own.total - own.free for id, own in found if own is not None and own.total}


def driver_cuda() -> tuple[int, int] | None:
    """The newest version of CUDA that the NVIDIA driver supports; None without one."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        version = int(nvml.nvmlSystemGetCudaDriverVersion())
    return version // 1000, version % 1000 // 10


def chosen(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that the visibility variables of `environment` leave, by the names that they have there."""
    if not any(gpu.rocm for gpu in gpus):
        return _listed(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    # ROCR_VISIBLE_DEVICES applies first, and renumbers the remaining devices.
    left = _listed(gpus, environment.get("ROCR_VISIBLE_DEVICES"))
    left = [replace(gpu, id=str(number), number=number) for number, gpu in enumerate(left)]
    return _listed(left, environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")))


def variables_for(gpus: Sequence[Gpu], rocm: bool = False) -> dict[str, str]:
    """Environment variables of a process that is to see these GPUs alone, in this order.

    Args:
        rocm: whether the machine's GPUs are AMD's; HIP reads both variables, and frameworks require them to agree.
    """
    ids = ",".join(gpu.id for gpu in gpus) or HIDDEN
    return {"CUDA_VISIBLE_DEVICES": ids} | ({"HIP_VISIBLE_DEVICES": ids} if rocm else {})


def _listed(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """As the drivers read such a variable: up to the first entry that names no GPU; none if one is named twice."""
    if variable is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in map(str.strip, variable.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None:
            break
        found.append(replace(gpu, id=entry))
    distinct = {(gpu.number, gpu.uuid or gpu.id) for gpu in found}
    return found if len(distinct) == len(found) else []


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.number == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    found = next((gpu for gpu in gpus if gpu.uuid.startswith(entry)), None)
    # NVML does not list instances by the names that older drivers gave them.
    return Gpu(entry) if found is None and entry.startswith("MIG-") else found


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, ready to be asked; None without a driver that works.

    Raises:
        EngineError: there is a driver, but the package that queries it is not installed.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        if NVIDIA_DRIVER.exists():
            raise EngineError(
                "this machine has an NVIDIA driver, and april counts GPUs by NVML: pip install nvidia-ml-py"
            ) from None
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _nvidia() -> list[Gpu]:
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = enumerate(map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())))
        return [gpu for number, handle in handles for gpu in _parts(nvml, number, handle)]


def _parts(nvml: Any, number: int, handle: Any) -> list[Gpu]:
    """A GPU, or its instances if it is in MIG mode."""
    mode = 0
    with suppress(nvml.NVMLError):  # most GPUs have no such mode
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    if not mode:
        return [replace(_nvml_gpu(nvml, number, handle), id=str(number))]
    # In MIG mode CUDA finds only the instances, and names them by UUID: the whole GPU cannot be used.
    instances = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # a place without an instance
            instances.append(_nvml_gpu(nvml, number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)))
    return instances


def _nvml_gpu(nvml: Any, number: int, handle: Any) -> Gpu:
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    total = free = 0
    with suppress(nvml.NVMLError):  # memory shared with a CPU is not reported
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    return Gpu(uuid, number, uuid, str(nvml.nvmlDeviceGetName(handle)), total, free)


def _amd() -> list[Gpu]:
    try:
        import amdsmi
    except (ImportError, KeyError, OSError):  # it comes with ROCm, and loads ROCm's library
        return []
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return []
    try:
        return [_amd_gpu(amdsmi, *numbered) for numbered in enumerate(amdsmi.amdsmi_get_processor_handles())]
    finally:
        amdsmi.amdsmi_shut_down()


def _amd_gpu(smi: Any, number: int, handle: Any) -> Gpu:
    # AMD SMI reports memory in MiB. ROCm builds the UUID of a GPU from its serial number.
    asic, memory = smi.amdsmi_get_gpu_asic_info(handle), smi.amdsmi_get_gpu_vram_usage(handle)
    total, used = (int(memory[name]) << 20 for name in ("vram_total", "vram_used"))
    serial = str(asic["asic_serial"]).removeprefix("0x").lower()
    return Gpu(str(number), number, f"GPU-{serial}", str(asic["market_name"]), total, total - used, rocm=True)
