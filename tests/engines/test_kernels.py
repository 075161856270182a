"""Which attention kernel computes what, without a GPU: a stand-in for flash-attn, and CUDA tensors without data."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from april.engines import kernels
from april.engines.kernels import KernelCase, attend, varlen_kernel
from april.training.forward import PolicyModel
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.packing import packed_attention
from tests import tiny
from tests.engines import architectures
from tests.training.steps import recipe, rollout
from tests.training.test_packing import ragged

STANDINS = Path(__file__).parents[1] / "standins"
CASE = KernelCase(torch.device("cpu"), torch.bfloat16, 4, 2, 8, 8, softcap=False, cached=False)


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    varlen_kernel.cache_clear()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield
    varlen_kernel.cache_clear()
    sys.modules.pop("flash_attn", None)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, which is exact and takes float32 as well."""
    monkeypatch.syspath_prepend(str(STANDINS))
    import flash_attn

    monkeypatch.setattr(flash_attn, "dtypes", [*flash_attn.dtypes, torch.float32])
    return flash_attn


def scores_and_gradients(architecture: str, packed: bool) -> list[torch.Tensor]:
    model = architectures.model(architecture)
    architectures.sharpen(model, 0.2)
    batch = ragged((31, 30, 17, 5, 1), architectures.VOCABULARY)
    if packed:
        with packed_attention(model):
            logp, entropy = PolicyModel(model)(batch)
    else:
        logp, entropy = PolicyModel(model)(batch)
    (logp.sum() + entropy.square().sum()).div(100).backward()
    return [logp.detach(), entropy.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("architecture", ["qwen3", "mistral-window", "gemma2"])
def test_flash_attn_is_called_directly_and_changes_no_score_and_no_gradient(architecture: str, flash_attn: Any) -> None:
    expected = scores_and_gradients(architecture, packed=False)
    flash_attn.calls.clear()
    found = scores_and_gradients(architecture, packed=True)
    assert flash_attn.calls.count((84, 4, 8)) == 3, "one call per layer"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_with_flash_attn_installed_makes_the_same_update(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has a function for flash-attn as well, which looks for a kernel called after april's attention."""
    chosen = recipe()
    chosen.training = dataclasses.replace(chosen.training, gradient_checkpointing=checkpointing)
    expected = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen)).train(rollout(1), 1)
    varlen_kernel.cache_clear()
    monkeypatch.syspath_prepend(str(STANDINS))
    import flash_attn

    monkeypatch.setattr(flash_attn, "dtypes", [torch.float32])
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen))
    assert learner.packs
    varlen_kernel.cache_clear()  # so that the trial falls into a forward pass that checkpoints, as on ranks
    flash_attn.calls.clear()
    assert learner.train(rollout(1), 1) == pytest.approx(expected, abs=1e-5)
    assert flash_attn.calls


def test_autocast_reaches_the_kernel(flash_attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are float32 under autocast, which flash-attn does not take."""
    monkeypatch.setattr(flash_attn, "dtypes", [torch.bfloat16])
    model = architectures.model("qwen3")
    architectures.sharpen(model, 0.2)
    batch = ragged((31, 17, 5), architectures.VOCABULARY)
    with torch.no_grad(), packed_attention(model):
        expected, _ = PolicyModel(model)(batch)
        flash_attn.calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = PolicyModel(model)(batch)
    assert flash_attn.calls.count((53, 4, 8)) == 3
    torch.testing.assert_close(found, expected, atol=0.2, rtol=0.1)


def test_a_kernel_that_cannot_be_used_is_reported_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "april"):
        assert varlen_kernel(CASE) is None
        assert varlen_kernel(CASE) is None
    first, second, third = (record.getMessage() for record in caplog.records)
    what = "attention over packed sequences (cpu, torch.bfloat16)"
    assert first == f"{what} does not use flash-attn: ModuleNotFoundError: No module named 'flash_attn'"
    assert second.startswith(f"{what} does not use torch.nn.attention.varlen: NotImplementedError: ")
    assert third == f"{what} uses scaled_dot_product_attention, one call for sequences of similar length"


def test_a_kernel_with_other_results_is_not_used(
    flash_attn: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exact = flash_attn.flash_attn_varlen_func
    assert varlen_kernel(CASE) is not None
    varlen_kernel.cache_clear()

    def without_windows(*args: Any, window_size: Any, **options: Any) -> torch.Tensor:
        return exact(*args, **options)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", without_windows)
    with caplog.at_level(logging.DEBUG, "april"):
        assert varlen_kernel(CASE) is None
    assert "does not use flash-attn: ValueError: differs from scaled_dot_product_attention by" in caplog.text


class SDPACalls(TorchFunctionMode):
    """Records calls of scaled_dot_product_attention: heads of queries and keys, and whether cuDNN may compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.made.append((args[0].shape[1], args[1].shape[1], torch.backends.cuda.cudnn_sdp_enabled()))
            return args[0].new_empty(*args[0].shape[:3], args[2].shape[3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("groups", "copied"), [(True, False), (False, True)])
def test_on_cuda_keys_are_copied_only_for_kernels_without_grouped_heads(
    groups: bool, copied: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_fused", {})
    monkeypatch.setattr(kernels, "_has_fused_kernel", lambda call, debug=False: groups or not call[-1])
    with FakeTensorMode(allow_non_fake_inputs=True), SDPACalls() as calls:
        query = torch.empty(1, 8, 24, 64, device="cuda")
        key = torch.empty(1, 2, 24, 64, device="cuda")
        assert attend(query, key, key, None, None, None).shape == query.shape
    assert calls.made == [(8, 8 if copied else 2, False)], "and cuDNN is off"
    assert not caplog.records


def test_the_math_kernel_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []
    monkeypatch.setattr(kernels, "_fused", {})
    monkeypatch.setattr(kernels, "_has_fused_kernel", lambda call, debug=False: bool(asked.append((call[-1], debug))))
    with FakeTensorMode(allow_non_fake_inputs=True), SDPACalls():
        query, key = (torch.empty(1, heads, 24, 300, device="cuda") for heads in (8, 2))
        for _ in range(3):
            attend(query, key, key, None, None, None)
    assert asked == [(True, False), (False, False), (False, True)]
    (record,) = caplog.records
    assert "heads of 300 runs in PyTorch's MATH kernel" in record.getMessage()


def test_kernel_trials_do_not_inherit_the_modes_of_the_pass() -> None:
    modes = []

    def load() -> Any:
        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
            modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
            raise RuntimeError("enough")

        return kernel

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu"), torch.inference_mode():
        patch.setattr(kernels, "flash_attn", load)
        varlen_kernel(CASE)
    assert modes == [(True, False, False)]
