"""Master weights: parameters in float32 that an optimizer updates, of modules that compute with rounded copies of them.

Mixed precision as in arXiv 1710.03740. The modules keep one parameter for each name, of the type they compute in, so
their layers, engines that share their parameters, and weight transfers need no casts. FSDP2 has its own master weights.

Invariants:
- each parameter that is trained in another type than it computes in has one master; every other parameter is its own;
- masters collect the gradients of all micro-batches; parameters of the modules hold none after a backward pass;
- after `write` the parameters of the modules are their masters, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from april.engines.embedded.model import convert


class MasterWeights:
    """Master weights of `modules`, whose parameters are cast to `dtype` in place.

    Args:
        modules: trained modules; parameters without gradient are cast and get no master.
        dtype: compute type.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), dtype: torch.dtype = torch.float32) -> None:
        self._masters: dict[Tensor, Tensor] = {}
        for module in modules:
            wide = {parameter: parameter.data for parameter in module.parameters() if parameter.requires_grad}
            convert(module, dtype)
            for parameter, master in wide.items():
                if parameter.dtype != master.dtype:
                    self._masters[parameter] = master
                    # A hook per parameter frees each rounded gradient at once, not after the whole backward pass.
                    parameter.register_post_accumulate_grad_hook(self._collect)

    @property
    def tensors(self) -> list[Tensor]:
        """All masters."""
        return list(self._masters.values())

    def of(self, tensor: Tensor) -> Tensor:
        """Return the master of a parameter; the tensor itself if it has none."""
        return self._masters.get(tensor, tensor)

    def trained(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors that an optimizer of `module` updates."""
        return [self.of(parameter) for parameter in module.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def write(self) -> None:
        """Copy the masters to the modules' parameters."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Make the modules' parameters their masters inside, for code that casts loaded tensors to the parameters'
        type."""
        rounded = {parameter: parameter.data for parameter in self._masters}
        for parameter, master in self._masters.items():
            parameter.data = master
        try:
            yield
        finally:
            for parameter, own in rounded.items():
                parameter.data = own
            self.write()

    @torch.no_grad()
    def _collect(self, parameter: Tensor) -> None:
        """Add a parameter's gradient to its master's: in bfloat16, sums over micro-batches would lose small addends."""
        gradient, parameter.grad = parameter.grad, None
        master = self._masters[parameter]
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
