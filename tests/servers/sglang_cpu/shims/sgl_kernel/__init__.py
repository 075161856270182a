"""Stands in for SGLang's CUDA kernels, which have no CPU wheel: every name imports, and raises when it is called.

The CPU engine imports the package and calls nothing of it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this is the stand-in for machines without one")

    missing.__name__ = name
    return missing
