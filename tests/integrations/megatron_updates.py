"""Two updates by a learner on Megatron, against the same updates in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.offload import Part
from april.training.ranks import Ranks
from tests import tiny
from tests.integrations import megatron_on_cpu
from tests.ranks.updates import settings
from tests.training.steps import rollout


def compare(ranks: Ranks, cases: list[str], tied: bool = True, checkpointing: bool = False) -> None:
    """Metrics to 1e-4, gradients of the first update to 1e-5, of the second to 1e-4, and parameters to 1e-5."""
    megatron_on_cpu.install()
    from april.training.megatron_learner import MegatronLearner

    for case in cases:
        made: dict[str, Any] = {"sharpness": 1.0, "tie_word_embeddings": tied}
        chosen = settings(case)
        chosen.training.gradient_checkpointing = checkpointing
        ours = MegatronLearner(tiny.model(**made), LearnerSettings.of(chosen), ranks, tiny.tokenizer())
        alone = LocalLearner(tiny.model(**made), LearnerSettings.of(settings(case)), tiny.tokenizer())
        for learner in (ours, alone):
            learner.release_gradients = lambda: None  # type: ignore[method-assign]
        for number, gradients in ((1, 1e-5), (2, 1e-4)):
            found, expected = (learner.train(rollout(number), number) for learner in (ours, alone))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                # Each side samples its own elements to see which of them an update changes.
                tolerance = 1e-2 if name == "updated_share" else 1e-4
                close = math.isclose(found[name], value, rel_tol=tolerance, abs_tol=1e-5)
                assert close, (case, name, found[name], value)
            parameter, gradient = ours.policy.translated(lambda own: own), ours.policy.translated(lambda own: own.grad)
            worst = [0.0, 0.0]
            for name, other in alone.model.named_parameters():
                worst[0] = max(worst[0], float((parameter(name) - other).detach().abs().max()))
                error = (gradient(name) - other.grad).norm() / (other.grad.norm() + 1e-4)
                worst[1] = max(worst[1], float(error))
            print(f"{case}: update {number}: parameters {worst[0]:.1e}, gradients {worst[1]:.1e}", flush=True)
            assert worst[0] <= 1e-5, (case, worst)
            assert worst[1] <= gradients, (case, worst)
        print(f"{case}: ok", flush=True)


def resume(ranks: Ranks, directory: str) -> None:
    """A Megatron checkpoint resumes in Megatron bit for bit, and in one process without Megatron; and vice versa."""
    megatron_on_cpu.install()
    from april.training.megatron_learner import MegatronLearner

    base, case = Path(directory), settings("reference")
    ours = MegatronLearner(tiny.model(sharpness=1.0), LearnerSettings.of(case), ranks, tiny.tokenizer())
    ours.train(rollout(1), 1)
    saved(ours, base / "first", ranks)
    again = MegatronLearner(policy_in(base / "first"), LearnerSettings.of(case), ranks, tiny.tokenizer())
    again.load(base / "first")
    saved(again, base / "second", ranks)
    for name in ("model.safetensors", "training/state.safetensors"):
        first, second = (load_file(base / place / name) for place in ("first", "second"))
        assert first.keys() == second.keys()
        for tensor in first:
            assert torch.equal(first[tensor], second[tensor]), tensor
    alone = LocalLearner(policy_in(base / "first"), LearnerSettings.of(case), tiny.tokenizer())
    alone.load(base / "first")
    found, expected, more = (learner.train(rollout(2), 2) for learner in (ours, alone, again))
    for name, value in expected.items():
        assert math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-5), (name, found[name], value)
    assert found == more
    if ranks.leads:
        alone.save(base / "alone")
    ranks.wait()
    last = MegatronLearner(policy_in(base / "alone"), LearnerSettings.of(case), ranks, tiny.tokenizer())
    last.load(base / "alone")
    found, expected = (learner.train(rollout(3), 3) for learner in (last, alone))
    for name, value in expected.items():
        assert math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-5), (name, found[name], value)
    print("resumed", flush=True)


def leave(ranks: Ranks, directory: str) -> None:
    """Memory leaves the device and comes back bit for bit; gathered weights and files are the same from host memory."""
    megatron_on_cpu.install()
    from april.training.megatron_learner import MegatronLearner

    chosen = settings("reference")
    chosen.model.compute_dtype = "bfloat16"  # with master weights
    made = LearnerSettings.of(chosen)
    stays, leaves = (MegatronLearner(tiny.model(sharpness=1.0), made, ranks, tiny.tokenizer()) for _ in range(2))
    for step in (1, 2):
        assert stays.train(rollout(step), step) == leaves.train(rollout(step), step)
        leaves.to_host()
        held = [tensor for part in Part for tensor in leaves.offload._tensors(part)]
        assert held
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        sent, found = (
            dict(pair for names in learner.buckets() for pair in learner.gather(names)) for learner in (stays, leaves)
        )
        assert all(torch.equal(tensor, found[name]) for name, tensor in sent.items())
        for learner, name in ((stays, "stays"), (leaves, "leaves")):
            saved(learner, Path(directory) / f"{name}-{step}", ranks)
        leaves.to_device()
    for file in ("model.safetensors", "training/state.safetensors"):
        one, other = (load_file(Path(directory) / f"{name}-2" / file) for name in ("stays", "leaves"))
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items() if name != "random"), file
    print("left", flush=True)


def saved(learner: Any, directory: Path, ranks: Ranks) -> None:
    if ranks.leads:
        directory.mkdir()
    ranks.wait()
    learner.save(directory)


def policy_in(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
