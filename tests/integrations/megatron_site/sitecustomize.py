"""In a folder of Python's module path: a process that imports Megatron-Bridge gets the stand-ins for CUDA first."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _First(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "megatron.bridge":
            sys.meta_path.remove(self)
            from tests.integrations import megatron_on_cpu

            megatron_on_cpu.install()


sys.meta_path.insert(0, _First())
