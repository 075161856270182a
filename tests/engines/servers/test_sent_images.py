"""Images in requests to servers, without a server: what is sent, and which servers are refused."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from april import EngineError, SamplingParams
from april.config.recipe import recipe_from_dict
from april.engines.servers.sent_images import SentImages
from april.engines.servers.vllm import OWN_PIXELS, connect_vllm
from april.engines.servers.vllm_images import RAW_TENSOR, vllm_features
from april.images.kept import KeptImages
from april.images.source import ImageError
from april.images.store import ImageStore
from april.images.support import load_images
from april.rollout.trajectory.prompt import Prompt
from april.training.server_engines import server_options
from tests import tiny, vision
from tests.engines.servers.test_speculation import answering, vllm
from tests.images.test_model_inputs import encode
from tests.training.test_images import samples_of


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    pictures = [vision.picture(tmp_path / "1.png", (40, 24), "blue"), vision.picture(tmp_path / "2.png", mark=8)]
    return encode(vision.image_store(), "Is ", pictures[0], " like ", pictures[1], "?")


def tensor(sent: list[Any]) -> Any:
    dtype, shape, data = sent
    assert data.code == RAW_TENSOR
    return np.frombuffer(data.data, dtype).reshape(shape)


def test_requests_have_the_pixels_ranges_and_hashes_of_their_images(policy: Path, prompt: Prompt) -> None:
    images = pickle.loads(pickle.dumps(SentImages(str(policy), True, vision.image_store())))
    sent = msgspec.json.decode(msgspec.json.encode(vllm_features(images, prompt.features, "salt")))
    assert sent["mm_hashes"] == {"image": [f"salt-{feature.digest}" for feature in prompt.features]}
    ranges = [{"offset": feature.offset, "length": feature.length} for feature in prompt.features]
    assert sent["mm_placeholders"] == {"image": ranges}
    store = vision.image_store()
    for encoded, feature in zip(sent["kwargs_data"]["image"], prompt.features, strict=True):
        decoded = msgspec.msgpack.decode(base64.b64decode(encoded))
        expected = store.pixels(feature)
        pixels, grid = tensor(decoded["pixel_values"]["data"]), tensor(decoded["image_grid_thw"]["data"])
        assert pixels.dtype == np.float32
        assert np.array_equal(pixels, expected.patches)
        assert grid.tolist() == list(expected.grid)
        assert decoded["pixel_values"]["field"][1]["slices"] == [[0, len(pixels), None]]


def test_each_process_that_sends_requests_finds_the_images_that_the_run_keeps(policy: Path, tmp_path: Path) -> None:
    store = load_images(str(policy), tmp_path / "run" / "images")
    assert isinstance(store, ImageStore)
    kept = KeptImages(tmp_path / "run", store)
    source = kept.keep(Path(vision.picture(tmp_path / "1.png")).read_bytes())
    _, [feature] = store.expand([vision.PLACEHOLDER], [source])
    images = pickle.loads(pickle.dumps(SentImages(str(policy), True, store)))
    assert images.store(feature).pixels(feature).grid == store.pixels(feature).grid


def test_a_missing_image_and_a_policy_without_images_are_named(policy: Path, prompt: Prompt, tmp_path: Path) -> None:
    text = tiny.save(tmp_path / "text")
    with pytest.raises(ImageError, match=r"1\.png: the policy reads none"):
        vllm_features(SentImages(str(text)), prompt.features, "salt")
    (tmp_path / "2.png").unlink()
    with pytest.raises(ImageError, match=r"2\.png"):
        vllm_features(SentImages(str(policy)), prompt.features, "salt")


def answers(model: Path, multimodal: dict[str, Any] | None) -> dict[str, Any]:
    """Those of a vLLM server that runs `model`."""
    made = vllm("cuda", "", None)
    made["/v1/models"]["data"][0]["root"] = str(model)
    made["/server_info"]["vllm_config"]["model_config"]["multimodal_config"] = multimodal
    return made


OWN = {"mm_device_do_normalize": False}


async def test_servers_that_would_compute_other_images_are_refused_when_they_are_connected(
    policy: Path, prompt: Prompt, tmp_path: Path
) -> None:
    images = SentImages(str(policy), expected=True)
    text = tiny.save(tmp_path / "text")
    other = tmp_path / "other"
    vision.save(other)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"patch_size": 4', '"patch_size": 8'))
    for model, multimodal, said in (
        (policy, {"mm_device_do_normalize": True}, f"would normalise pixels .* start it with {OWN_PIXELS}"),
        (policy, None, "reads no images: start it with the policy"),
        (text, OWN, "reads no images: start it with the policy"),
        (other, OWN, "images have patch_size = 8 where the policy, .*, has 4: start it with the policy"),
    ):
        async with answering(answers(model, multimodal)) as url:
            with pytest.raises(EngineError, match=said):
                await connect_vllm(url, vocab_size=200, images=images)
            # Without images in the prompts, the server does.
            await (await connect_vllm(url, vocab_size=200, images=SentImages(str(policy)))).close()
    async with answering(answers(policy, OWN)) as url:
        engine = await connect_vllm(url, vocab_size=200, images=images)
        await engine.close()


async def test_samples_with_images_are_refused_by_servers_that_take_none(policy: Path, prompt: Prompt) -> None:
    [sample] = samples_of([prompt], SamplingParams(8), 1)
    async with answering(answers(policy, OWN)) as url:
        engine = await connect_vllm(url, vocab_size=200)
        with pytest.raises(ValueError, match=r"its prompt has images, but vLLM at .* gets no images from april"):
            engine.submit(sample)
        await engine.close()


def test_servers_that_april_starts_take_the_pixels_as_they_are() -> None:
    recipe = recipe_from_dict({"engine": {"engine": "vllm"}})
    assert OWN_PIXELS in server_options(recipe, vllm=True, gpus=0, images=True)
    assert OWN_PIXELS not in server_options(recipe, vllm=True, gpus=0)
