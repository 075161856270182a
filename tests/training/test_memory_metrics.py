"""What a training step holds at once: sizes of every tensor it makes, seen below autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from april.algorithms import logprobs
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from tests import tiny
from tests.training.steps import recipe, rollout

VOCABULARY = 3000


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest(chunk: int, monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[int, int]:
    """The largest tensor of a step, and the logits that the step's tokens have in all."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    chosen = recipe(**settings)
    chosen.training.max_tokens_per_micro_batch = 100_000
    learner, step = (
        LocalLearner(tiny.model(sharpness=1.0, vocab_size=VOCABULARY), LearnerSettings.of(chosen)),
        rollout(1),
    )
    with Largest() as seen:
        learner.train(step, 1)
    tokens = sum(int(sample.loss_mask.sum()) for group in step.groups for sample in group.samples)
    return seen.elements, tokens * VOCABULARY


@pytest.mark.parametrize("settings", [{}, {"entropy_coef": 0.1, "kl_coef": 0.1}, {"algorithm": "ppo"}])
def test_the_logits_of_the_batch_never_exist(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the largest tensor is a chunk of logits or the head's weight."""
    chunk = 20 * VOCABULARY
    elements, logits = largest(chunk, monkeypatch, **settings)
    assert elements <= max(chunk, 32 * VOCABULARY) < logits / 4
    whole, _ = largest(1 << 40, monkeypatch, **settings)
    assert whole > logits / 2, "this would see them if they did"


@pytest.mark.parametrize("trained", ["policy", "critic"])
def test_gradient_checkpointing_keeps_less_for_the_backward_pass(trained: str) -> None:
    """Of the policy and of its critic, of a model in the mode in which `from_pretrained` leaves it."""
    held = {}
    for checkpointing in (False, True):
        chosen = recipe(algorithm="ppo")
        chosen.training.gradient_checkpointing = checkpointing
        learner = LocalLearner(tiny.model(sharpness=1.0, num_hidden_layers=6).eval(), LearnerSettings.of(chosen))
        kept = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with learner.packed():
            batch = learner.prepare(rollout(1))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                getattr(learner, trained)(batch)
        held[checkpointing] = sum(kept)
    assert held[True] < held[False] / 4
