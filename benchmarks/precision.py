"""What types of parameters and of computation cost, on a CPU: which updates arrive, and what a decode pass casts.

    python benchmarks/precision.py

1. The share of the parameters with a gradient that ten training steps change, by learning rate: float32 parameters with
   bfloat16 computation, bfloat16 parameters, and bfloat16 parameters under optimizers that compensate (torchao's
   AdamW with stochastic rounding, optimi's with Kahan summation), where these packages are installed; with the bytes
   of parameters, gradient sums and optimizer state for each parameter.
2. Losses of 30 updates on the same rollouts in float32 and with bfloat16 computation.
3. A decode pass of 8 samples by autocast over float32 parameters and by a bfloat16 copy: seconds, and
   operators: autocast adds casts.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch
from record import save, spread
from torch.utils._python_dispatch import TorchDispatchMode

from april.engines.embedded.model import convert
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from tests import tiny
from tests.training.steps import recipe, rollout

RATES = (1e-6, 1e-5, 1e-4, 1e-3)


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def learner(parameters: str, computes: str, rate: float) -> LocalLearner:
    chosen = recipe()
    chosen.model.dtype, chosen.model.compute_dtype = parameters, computes  # type: ignore[assignment]
    chosen.training.learning_rate = rate
    return LocalLearner(tiny.model(sharpness=1.0).to(getattr(torch, parameters)), LearnerSettings.of(chosen))


def compensating(name: str, tensors: list[torch.Tensor], rate: float) -> Any:
    settings = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
    if name == "torchao":
        optimizer = import_module("torchao.optim")._AdamW(tensors, **settings, bf16_stochastic_round=True)
        optimizer.register_step_pre_hook(_rate_as_tensor)
        return optimizer
    return import_module("optimi").AdamW(tensors, **settings, kahan_sum=True)


def _rate_as_tensor(optimizer: Any, *_: Any) -> None:
    """torchao takes no learning rate that is a number."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])


def share(parameters: str, computes: str, rate: float, optimizer: str = "") -> dict[str, float]:
    made = learner(parameters, computes, rate)
    trained = made.masters.trained(made.policy)
    if optimizer:
        made.optimizer = compensating(optimizer, trained, rate)
    before = [tensor.detach().clone() for tensor in trained]
    met = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in trained]
    for number in range(1, 11):
        made.train(rollout(number), number)
        for seen, tensor in zip(met, trained, strict=True):
            seen |= tensor.grad != 0
    changed = sum(int(((a != b) & m).sum()) for a, b, m in zip(before, trained, met, strict=True))
    state = [t for own in made.optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor)]
    count = sum(tensor.numel() for tensor in trained)
    copy = 2 if parameters != computes else 0
    held = sum(t.nbytes for t in (*trained, *(t.grad for t in trained), *state))
    return {"changed": changed / sum(int(m.sum()) for m in met), "bytes_per_parameter": held / count + copy}


def decode(kind: str) -> dict[str, Any]:
    model = tiny.model(hidden_size=256, intermediate_size=768, num_hidden_layers=8, head_dim=64).eval()
    if kind == "copy":
        convert(model, torch.bfloat16)
    ids = torch.arange(8)[:, None] + 1

    def forward() -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            model(input_ids=ids, use_cache=False)

    forward()
    with Counted() as counted:
        forward()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        forward()
        seconds.append(time.perf_counter() - began)
    return {"seconds": spread(seconds), "operators": counted.calls}


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # torchao would compile its update
    arms = {"float32, computed in bfloat16": ("float32", "bfloat16", ""), "bfloat16": ("bfloat16", "bfloat16", "")}
    for package in ("torchao", "optimi"):
        try:
            import_module(package)
        except ImportError:
            continue
        arms[f"bfloat16, {package}"] = ("bfloat16", "bfloat16", package)
    shares = {name: {f"{rate:g}": share(a, b, rate, c) for rate in RATES} for name, (a, b, c) in arms.items()}
    curves = {}
    for computes in ("float32", "bfloat16"):
        made = learner("float32", computes, 1e-3)
        curves[computes] = [made.train(rollout(1), number)["loss"] for number in range(1, 31)]
    decoding = {kind: decode(kind) for kind in ("autocast", "copy", "autocast", "copy")}
    print(save(__file__, {"shares": shares, "losses": curves, "decode": decoding}))


if __name__ == "__main__":
    main()
