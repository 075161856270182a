"""Routers of a mixture of experts, as transformers 5 computes them: a module for each layer that chooses the experts.

Invariants:
- replay changes which experts are chosen and nothing else: their weights are computed by the router's own code from its
  own scores, and gradients flow through them;
- a router is replayed only if the indices that its forward pass returns are the replayed ones (`RouterReplay`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from april.rollout.trajectory.routes import Experts, route_dtype, unknown


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Shape of one token's routes."""

    layers: int
    """Layers with a router."""
    top_k: int
    experts: int

    def __str__(self) -> str:
        return f"{self.layers} layers with {self.top_k} of {self.experts} experts"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the indices of experts."""
        return route_dtype(self.experts)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in the order of its layers; none if it is no mixture of experts.

    Raises:
        ValueError: layers choose different numbers of experts.
    """
    routers = [module for module in model.modules() if _is_router(module)]
    if len(shapes := {(module.top_k, module.num_experts) for module in routers}) > 1:
        raise ValueError(f"{type(model).__name__}: its routers choose among different numbers of experts: {shapes}")
    return routers


def route_shape(model: nn.Module) -> RouteShape:
    """Return the shape of a token's routes.

    Raises:
        ValueError: the model has no routers that april knows.
    """
    routers = routers_of(model)
    if not routers:
        raise ValueError(no_routers(model))
    top_k, experts = routers[0].top_k, routers[0].num_experts
    return RouteShape(len(routers), int(top_k), int(experts))  # type: ignore[arg-type]


def is_named_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers 5, whose class is named so."""
    return type(module).__name__.lower().endswith("router") and isinstance(getattr(module, "weight", None), Tensor)


def no_routers(model: nn.Module) -> str:
    """Return the error message for a model without routers."""
    return f"{type(model).__name__} has no routers, as transformers 5 builds them, whose routes could be replayed"


def _is_router(module: nn.Module) -> bool:
    sizes = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return is_named_router(module) and all(isinstance(size, int) for size in sizes)


class RouteCapture:
    """Records the routes of each forward pass of a model.

    Raises:
        ValueError: the model has no routers that april knows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shape = route_shape(model)
        self._dtype = torch.uint8 if self.shape.dtype.itemsize == 1 else torch.uint16
        self._layers: list[Tensor] = []
        self._hooks = [router.register_forward_hook(self._record) for router in routers_of(model)]

    def _record(self, router: nn.Module, arguments: Any, output: Any) -> None:
        self._layers.append(_indices(output).to(self._dtype))

    def start(self) -> None:
        """Forget the routes of a pass that failed."""
        self._layers = []

    def remove(self) -> None:
        """Record no more passes."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Any:
        """Return the routes of the last pass, a NumPy array [tokens, layers, top k]."""
        layers, self._layers = self._layers, []
        return torch.stack(layers, 1).cpu().numpy()


def _indices(output: Any) -> Tensor:
    """Return the chosen experts, [tokens, top k], of a router's output."""
    for part in output if isinstance(output, tuple) else (output,):
        if isinstance(part, Tensor) and not part.is_floating_point():
            return part
    raise ValueError("a router returned no indices of experts: april does not know this architecture's routers")


class RouterReplay:
    """Replaces the experts that a model's routers choose.

    Attributes:
        routes: [tokens, layers, top k] for the tokens of the next forward passes, in their order, uint8 or uint16; None
            while the routers choose. Gradient checkpointing repeats a pass in the backward pass, so routes stay until
            then.

    Raises:
        ValueError: the model has no routers that april knows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shape = route_shape(model)
        self.unknown = unknown(self.shape.dtype)
        self.routes: Tensor | None = None
        self._routers = routers_of(model)
        self._modes: list[_ReplayedTopK] = []

    def unknown_routes(self, tokens: int) -> Experts:
        """Return the routes of `tokens` tokens, all of them unknown."""
        shape = self.shape
        routes: Any = np.full((tokens, shape.layers, shape.top_k), self.unknown, shape.dtype)
        return routes  # type: ignore[no-any-return]

    def joined(self, routes: Iterable[Experts | None], widths: Sequence[int]) -> Experts:
        """Return the routes of several rows of tokens, one row after the other.

        Args:
            routes: routes of each row's first tokens; None if they are unknown.
            widths: tokens of each row, padding included; further rows without routes may follow.
        """
        whole = self.unknown_routes(sum(widths))
        for start, known in zip(itertools.accumulate(widths, initial=0), routes, strict=False):
            if known is not None:
                whole[start : start + len(known)] = known
        return whole

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replay inside the block. The model must not be copied there: a copy would replay as well."""
        hooks = []
        for layer, router in enumerate(self._routers):
            hooks.append(router.register_forward_pre_hook(partial(self._begin, layer)))
            hooks.append(router.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            self.routes = None
            for hook in hooks:
                hook.remove()

    def _begin(self, layer: int, router: nn.Module, arguments: Any) -> None:
        if self.routes is not None:
            experts = self.routes[:, layer].long()
            mode = _ReplayedTopK(experts, experts != self.unknown, self.shape)
            mode.__enter__()
            self._modes.append(mode)

    def _end(self, router: nn.Module, arguments: Any, output: Any) -> None:
        if self._modes:
            mode = self._modes.pop()
            mode.__exit__(None, None, None)
            # Without an output the router raised, and its error is reported.
            if output is not None and not mode.used:
                raise RuntimeError(
                    f"{type(router).__name__} chooses experts in a way that april does not replay: set "
                    'training.router_replay = "off"'
                )


class _ReplayedTopK(TorchFunctionMode):
    """In place of the `topk` that chooses experts, returns the recorded ones and their scores.

    Args:
        experts: [tokens, top k].
        known: which of them are recorded; the router chooses the others.
    """

    def __init__(self, experts: Tensor, known: Tensor, shape: RouteShape) -> None:
        super().__init__()
        self.experts = experts
        self.known = known
        self.shape = shape
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, chosen = args[0], result[1]
        # Routers with groups of experts also choose groups, from scores of another shape.
        if scores.shape != (len(self.experts), self.shape.experts) or chosen.shape != self.experts.shape:
            return result
        self.used = True
        chosen = torch.where(self.known, self.experts, chosen)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
