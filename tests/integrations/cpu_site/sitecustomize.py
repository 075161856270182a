"""In a folder of Python's module path: processes that import these packages get their stand-ins for CUDA first."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from typing import Any

STAND_INS = {
    "megatron.bridge": "tests.integrations.megatron_on_cpu",
    "openrlhf": "tests.integrations.openrlhf.on_cpu",
}
"""By the name of the package: a module whose `install` is called."""


class _First(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if module := STAND_INS.pop(name, None):
            importlib.import_module(module).install()


sys.meta_path.insert(0, _First())
