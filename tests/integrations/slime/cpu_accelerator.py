"""Registers a CPU where slime expects a GPU: its engine actor wants a device number, also for external servers."""

from __future__ import annotations


def register() -> None:
    from slime.utils.accelerator import register_accelerator
    from slime.utils.accelerator.cuda import CUDAAccelerator

    class CPU(CUDAAccelerator):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def resolve_visible_device_id(self, physical_device_id: int | str) -> int:
            return int(physical_device_id)

    register_accelerator("cpu", CPU, priority=100)
