"""Episodes with images in the prompt and in later turns: what the engine records is what the trainer computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from april import EnvStep, FinishReason, Group, Prompt, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.environments.bridge import ChatBridge
from april.images.kept import KeptImages
from april.images.store import ImageStore
from april.rendering.conversation import decoder
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.features import check_features
from april.rollout.trajectory.sample import Sample
from april.tasks.encoding import Encoder
from april.tasks.task import Problem
from tests import vision
from tests.engines.test_episodes import collected as groups_of
from tests.scheduling import scheduler_of
from tests.training.test_images import recorded, scores

END = vision.TOKEN["<|im_end|>"]
SAMPLING = SamplingParams(60, max_turns=5, stop_token_ids=(END,), stop=tuple("aeiouAEIOU 0123456789"))
CONTEXT = 300


class Screens:
    """Answers with text or with a picture that depends on seed and turn; pictures of a seed have equal sizes, so that
    their tokens are equal."""

    forms = ("text", "image", "two images", "tool")

    def reset(self, prompt: Any, seed: int) -> Any:
        self.random, self.turns = random.Random(seed), 0
        self.size = (8 * self.random.randint(2, 5), 8 * self.random.randint(2, 3))
        return [] if seed % 2 else self.answer("image")

    def step(self, turn: Any) -> EnvStep:
        self.turns += 1
        return EnvStep(self.answer(self.random.choice(self.forms)), done=self.random.random() < 0.1)

    def answer(self, form: str) -> Any:
        if form == "text":
            return f"turn {self.turns}"
        shown = [{"type": "image", "image": self.picture()} for _ in range(1 + (form == "two images"))]
        return [{"role": "tool" if form == "tool" else "user", "content": [{"type": "text", "text": "Now"}, *shown]}]

    def picture(self) -> Any:
        colour = tuple(self.random.randrange(256) for _ in range(3))
        picture = Image.new("RGB", self.size, colour)
        return picture.convert("CMYK") if colour[0] % 2 else np.asarray(picture)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def policy() -> Any:
    return vision.model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def store(folder: Path) -> ImageStore:
    return vision.image_store(kept=folder / "images")


def collected(policy: Any, store: ImageStore, folder: Path, steps: int, target: int, **own: Any) -> dict[int, Group]:
    bridge = ChatBridge(vision.tokenizer(), [END], stops=SAMPLING.stop)
    encoder = Encoder(vision.tokenizer(), "always", bridge.prompt_arguments, images=store)
    pictures = [
        vision.picture(folder / f"{number}.png", (24 + 8 * (number % 2), 16), mark=number) for number in range(6)
    ]

    def prompt(number: int) -> Prompt:
        shown = [{"type": "image", "image": path} for path in pictures[number % 6 : number % 6 + number % 3]]
        return encoder(Problem(str(number), [{"role": "user", "content": [*shown, {"type": "text", "text": "Play."}]}]))

    async def score(prompt: Prompt, sample: Any) -> float:
        return 1.0

    limits, kept = EpisodeLimits(retry_delay=0.0), KeptImages(folder, store)
    scheduler = scheduler_of(
        EmbeddedEngine(policy, images=store, context_length=CONTEXT, on_update="keep", **own),
        (prompt(number) for number in range(1000)),
        score,
        episodes=EnvironmentEpisodes(Screens, bridge, CONTEXT, limits, images=store, receive=kept.received),
        rollout_batch_size=2,
        over_sampling_batch_size=target,
        n_samples_per_prompt=2,
        max_staleness=4,
        retry_delay=0.0,
        sampling=SAMPLING,
        decode=decoder(vision.tokenizer()),
    )
    return groups_of(scheduler, steps)


@pytest.fixture(scope="module")
def undisturbed(policy: Any, store: ImageStore, folder: Path) -> dict[int, Group]:
    return collected(policy, store, folder, 4, 2)


def samples_of(groups: dict[int, Group]) -> list[Sample]:
    return [sample for _, group in sorted(groups.items()) for sample in group.samples]


def test_episodes_have_images_in_prompts_and_in_later_turns(undisturbed: dict[int, Group]) -> None:
    samples = samples_of(undisturbed)
    later = [len(sample.features) - len(sample.prompt_features) for sample in samples]
    assert max(later) > 2
    assert any(sample.prompt_features for sample in samples)
    assert max(sample.turns for sample in samples) == 5
    assert not any(sample.finish is FinishReason.BRIDGE for sample in samples)
    for sample in samples:
        whole = [*sample.prompt_ids, *sample.response_ids]
        check_features(whole, sample.features)
        # Placeholders of images are the environment's tokens: none is trained on.
        inside = [i for feature in sample.features for i in range(feature.offset, feature.end)]
        mask = [False] * len(sample.prompt_ids) + sample.loss_mask.tolist()
        assert not any(mask[i] for i in inside)
        assert {whole[i] for i in inside} <= {vision.PLACEHOLDER}


@pytest.mark.parametrize("packed", [False, True])
def test_engine_and_trainer_agree_over_all_turns(
    packed: bool, policy: Any, store: ImageStore, undisturbed: dict[int, Group]
) -> None:
    samples = samples_of(undisturbed)
    drawn = recorded(samples)[np.concatenate([sample.loss_mask for sample in samples])]
    assert (scores(policy, store, samples, packed) - drawn).abs().max() < 1e-4


def test_the_other_family_agrees_too(store: ImageStore, folder: Path) -> None:
    """Qwen2.5-VL has other positions than Qwen3-VL."""
    other = vision.model("Qwen2_5_VL")
    samples = samples_of(collected(other, store, folder, 2, 4))
    assert any(len(sample.features) > len(sample.prompt_features) for sample in samples)
    drawn = recorded(samples)[np.concatenate([sample.loss_mask for sample in samples])]
    assert (scores(other, store, samples, True) - drawn).abs().max() < 1e-4


@settings(max_examples=4, deadline=None)
@given(
    running=st.integers(1, 8),
    interval=st.sampled_from([1, 3, 8]),
    target=st.integers(3, 6),
    chunk=st.sampled_from([5, 64]),
    memory=st.sampled_from([None, 500_000]),
)
def test_interrupted_episodes_have_the_same_tokens_and_images(
    policy: Any,
    store: ImageStore,
    folder: Path,
    undisturbed: dict[int, Group],
    running: int,
    interval: int,
    target: int,
    chunk: int,
    memory: int | None,
) -> None:
    more = {"max_num_seqs": running, "stream_interval": interval, "prefill_chunk": chunk, "kv_cache_bytes": memory}
    found = collected(policy, store, folder, 3, target, **more)
    for id in found.keys() & undisturbed.keys():
        for sample, whole in zip(found[id].samples, undisturbed[id].samples, strict=True):
            assert sample.response_ids == whole.response_ids
            assert sample.features == whole.features
            np.testing.assert_allclose(sample.logprobs, whole.logprobs, atol=1e-4)


def test_a_saved_group_has_its_images(undisturbed: dict[int, Group]) -> None:
    for group in undisturbed.values():
        again = Group.from_dict(group.to_dict())
        assert [sample.features for sample in again.samples] == [sample.features for sample in group.samples]
