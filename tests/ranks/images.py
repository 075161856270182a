"""Updates on prompts with images on several ranks, against the same updates in one process."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from april.images.store import ImageStore
from april.rollout.batch import RolloutBatch
from april.rollout.trajectory.prompt import Prompt
from april.training.distributed_learner import for_followers
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner
from tests import vision
from tests.images.test_model_inputs import encode
from tests.ranks.updates import assert_same, settings
from tests.training.steps import rollout


class CountedImages(ImageStore):
    """A store that notes which images were read."""

    def __init__(self) -> None:
        super().__init__(vision.image_processor(), vision.PLACEHOLDER)
        self.read: set[str] = set()

    def _read(self, feature):  # type: ignore[no-untyped-def]
        self.read.add(feature.source)
        return super()._read(feature)


def prompts(directory: str) -> list[Prompt]:
    """Two prompts with images, which each rank finds in its files, and more without."""
    store, folder = vision.image_store(), Path(directory)
    pictures = [str(folder / f"{number}.png") for number in range(3)]
    given: list[list[str]] = [pictures[:2], [], pictures[2:], []]
    return [encode(store, *images, "What is it?") for images in given]


def step(number: int, directory: str) -> RolloutBatch:
    return rollout(number, groups=4, prompts=prompts(directory))


def compare(ranks: Ranks, directory: str, cases: list[str], architecture: str, checkpointing: bool = False) -> None:
    """As `updates.compare`; micro-batches are so small that many have no image."""
    for case in cases:
        chosen, single = settings(case), settings(case)
        for each in (chosen, single):
            each.training.max_tokens_per_micro_batch = 60
        chosen.training.gradient_checkpointing = checkpointing
        if case == "lora":
            for each in (chosen, single):
                each.lora.target_modules = ("q_proj", "qkv")
        own = CountedImages()

        def policy() -> object:
            return vision.model(architecture, sharpness=1.0)

        sharded = ShardedLearner(policy(), LearnerSettings.of(chosen), ranks, images=own)
        alone = LocalLearner(policy(), LearnerSettings.of(single), images=vision.image_store())
        for learner in (sharded, alone):
            learner.release_gradients = lambda: None  # type: ignore[method-assign]
        for number in (1, 2):
            batch = step(number, directory)
            found = sharded.train(batch if ranks.leads else for_followers(batch), number)
            expected = alone.train(step(number, directory), number)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                tolerance = 1e-2 if name == "updated_share" else 1e-4
                close = math.isclose(found[name], value, rel_tol=tolerance, abs_tol=1e-5)
                assert close, (case, name, found[name], value)
            assert_same(sharded, alone, case, 1e-5 if number == 1 else 1e-4, 1e-6)
        tower = [p for name, p in alone.model.named_parameters() if "visual" in name and p.requires_grad]
        assert any(float(p.grad.abs().max()) > 0 for p in tower)
        assert own.read
        torch.distributed.barrier()
        print(f"{case}: ok", flush=True)
