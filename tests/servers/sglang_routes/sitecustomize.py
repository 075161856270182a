"""Lets SGLang capture routes on a CPU: it registers their buffer with CUDA, which a CPU build of torch lacks.

The folder is put on a server's PYTHONPATH, where this file hides the environment's own `sitecustomize`.
"""

import runpy
import sysconfig
from pathlib import Path

import torch


class _Cudart:
    """Registers no memory: copies on a CPU need none."""

    @staticmethod
    def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        return 0


runpy.run_path(str(Path(sysconfig.get_path("purelib"), "sitecustomize.py")))
torch.cuda.cudart = _Cudart
