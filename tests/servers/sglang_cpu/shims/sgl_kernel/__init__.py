"""Stands in for SGLang's CUDA kernels, which have no CPU wheel: every name imports, and raises when it is called.

The CPU engine imports the package and calls nothing of it. The modules of models with images look up operators that the
package would register with torch, and call none.
"""

from typing import Any

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for _operator in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _LIBRARY.define(f"{_operator}() -> ()")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this is the stand-in for machines without one")

    missing.__name__ = name
    return missing
