"""Images in requests to SGLang's server, without a server: their form, and which servers are refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from april import EngineError, SamplingParams
from april.config.recipe import recipe_from_dict
from april.engines.servers.client import HTTPClient, RequestError, fault_of
from april.engines.servers.sent_images import SentImages
from april.engines.servers.sglang import SGLang, connect_sglang
from april.engines.servers.sglang_images import KEEPS_IDS, sglang_fields
from april.engines.servers.stream import Stream
from april.images.source import ImageError
from april.images.support import load_images
from april.rollout.engine import Fault
from april.rollout.trajectory.prompt import Prompt
from april.training.server_engines import server_options
from tests import tiny, vision
from tests.engines.servers.test_speculation import answering
from tests.images.test_model_inputs import encode

PATCH = 14
VIDEO = vision.TOKEN["<|video_pad|>"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save(tmp_path_factory.mktemp("policy"), "Qwen2_5_VL", patch=PATCH)


@pytest.fixture
def images(policy: Path) -> SentImages:
    return SentImages(str(policy), expected=True)


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """A prompt with two images, one of which is resized."""
    pixels = np.random.default_rng(0).integers(0, 256, (3 * 211, 3 * 300, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    second = vision.picture(tmp_path / "2.png", mark=8)
    return encode(vision.image_store(PATCH), "Is ", str(tmp_path / "1.png"), " like ", second, "?")


def decoded(data: str) -> Image.Image:
    head, encoded = data.split(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def test_pictures_need_no_resizing_and_have_the_pixels_of_the_trainer(images: SentImages, prompt: Prompt) -> None:
    sent = sglang_fields(images, prompt.token_ids, prompt.features, "weights-1")
    assert json.dumps(sent)
    store = vision.image_store(PATCH)
    for data, feature in zip(sent["image_data"], prompt.features, strict=True):
        picture = decoded(data)
        made = vision.image_processor(PATCH)(images=[picture], return_tensors="np")
        expected = store.pixels(feature)
        assert made["image_grid_thw"].tolist() == [list(expected.grid)]
        assert np.array_equal(made["pixel_values"], expected.patches)
        assert (picture.height, picture.width) == (expected.grid[1] * PATCH, expected.grid[2] * PATCH)


def test_pictures_name_the_weights(images: SentImages, prompt: Prompt) -> None:
    """The server's cache of embeddings has the hash of these bytes as its key, and outlives weight updates."""

    def data(salt: str) -> list[str]:
        return list(sglang_fields(images, prompt.token_ids, prompt.features, salt)["image_data"])

    assert data("a") == data("a")
    assert all(one != other for one, other in zip(data("a"), data("b"), strict=True))
    assert [decoded(one).tobytes() for one in data("a")] == [decoded(one).tobytes() for one in data("b")]


def test_each_image_has_one_placeholder_and_all_other_ids_stay(images: SentImages, prompt: Prompt) -> None:
    response = [40, 41, 42]
    sent = sglang_fields(images, [*prompt.token_ids, *response], prompt.features, "")["input_ids"]
    lengths = iter(feature.length for feature in prompt.features)
    expanded = [id for token in sent for id in [token] * (next(lengths) if token == vision.PLACEHOLDER else 1)]
    assert expanded == [*prompt.token_ids, *response]
    assert sent.count(vision.PLACEHOLDER) == len(prompt.features)


@pytest.mark.parametrize("token", [vision.PLACEHOLDER, VIDEO])
def test_a_drawn_placeholder_is_no_further_image(images: SentImages, prompt: Prompt, token: int) -> None:
    with pytest.raises(RequestError, match=rf"token {token}, outside of the images: SGLang would take it"):
        sglang_fields(images, [*prompt.token_ids, 40, token], prompt.features, "")


def test_a_request_does_not_end_with_the_beginning_of_an_image(images: SentImages, prompt: Prompt) -> None:
    """SGLang fails at it: it reads the token behind."""
    start = vision.TOKEN["<|vision_start|>"]
    with pytest.raises(RequestError, match=rf"token {start} is the last one: SGLang would look for an image"):
        sglang_fields(images, [*prompt.token_ids, 40, start], prompt.features, "")
    ids = [*prompt.token_ids, start, 40]
    assert sglang_fields(images, ids, prompt.features, "")["input_ids"][-2:] == [start, 40]


def test_an_image_processor_without_colours_is_named(policy: Path, prompt: Prompt) -> None:
    store: Any = load_images(str(policy))
    store._processor.image_std = [0.3, 0.3, 0.3]
    store.pixels(prompt.features[0])
    store._processor.image_std = [0.4, 0.4, 0.4]
    with pytest.raises(ImageError, match=r"1\.png: its pixels are no colours .* by the image processor Qwen2VL"):
        store.picture(prompt.features[0])


def stream_of(prompt: Prompt) -> Stream:
    ids = [*prompt.token_ids, 40]
    return Stream("0.0", "r", ids, SamplingParams(9), 0, 9, 0, 200, features=prompt.features)


def event(prompt_tokens: int) -> bytes:
    meta = {"completion_tokens": 1, "prompt_tokens": prompt_tokens, "weight_version": "0"}
    return json.dumps({"output_ids": [7], "meta_info": meta | {"output_token_logprobs": [[-1.0, 7, None]]}}).encode()


def test_a_server_that_expands_a_prompt_otherwise_ends_the_run(images: SentImages, prompt: Prompt) -> None:
    stream, api = stream_of(prompt), SGLang(HTTPClient("http://there", 1.0), images=images)
    count = len(stream.token_ids)
    delta = api.read(event(count), stream)
    assert delta is not None
    assert list(delta.token_ids) == [7]
    said = rf"SGLang at http://there makes {count + 2} tokens .* image processor of {images.model} makes {count}: start"
    with pytest.raises(ImageError, match=said) as error:
        api.read(event(count + 2), stream)
    assert fault_of(error.value) is Fault.INPUT


def answers(model: Path, **server: Any) -> dict[str, Any]:
    """Answers of an SGLang server that runs `model`."""
    described = {
        "model_path": str(model),
        "tokenizer_path": str(model),
        "weight_version": "default",
        "model_type": "qwen2_5_vl",
        "has_image_understanding": True,
    }
    options = {"mm_preprocess_cache_size_mb": 64, "max_running_requests": 4, "max_req_input_len": 64}
    return {
        "/model_info": described,
        "/server_info": {**options, "internal_states": [{}], "max_total_num_tokens": 1000, **server},
    }


async def test_servers_that_would_compute_other_images_are_refused_when_they_are_connected(
    policy: Path, images: SentImages, tmp_path: Path
) -> None:
    text, other = tiny.save(tmp_path / "text"), vision.save(tmp_path / "other", "Qwen2_5_VL", patch=PATCH)
    [settings] = other.glob("*processor_config.json")
    changed = json.loads(settings.read_text())
    changed.get("image_processor", changed)["image_mean"] = [0.5, 0.5, 0.5]
    settings.write_text(json.dumps(changed))
    blind = answers(policy)
    blind["/model_info"]["has_image_understanding"] = False
    for answer, said in (
        (answers(policy, mm_preprocess_cache_size_mb=None), f"decode and encode .* start it with {KEEPS_IDS} 256"),
        (answers(policy, mm_process_config={"image": {"max_pixels": 9}}), "the images of --mm-process-config"),
        (blind, "reads no images: start it with the policy"),
        (answers(text), "reads no images: start it with the policy"),
        (answers(other), r"has the image processor of .*, with image_mean = \[0\.5.* start it with the policy"),
    ):
        async with answering(answer) as url:
            with pytest.raises(EngineError, match=said):
                await connect_sglang(url, vocab_size=200, images=images)
            # Without images in the prompts, the server does.
            await (await connect_sglang(url, vocab_size=200, images=SentImages(str(policy)))).close()
    small = vision.save(tmp_path / "small", "Qwen2_5_VL")
    async with answering(answers(small)) as url:
        with pytest.raises(EngineError, match=r"computes qwen2_5_vl with patch_size = 14 alone, and the policy has 4"):
            await connect_sglang(url, vocab_size=200, images=SentImages(str(small), expected=True))
    kept = answers(policy, mm_preprocess_cache_size_mb=None)
    kept["/model_info"]["model_type"] = "qwen3_vl"
    for answer in (answers(policy), kept):
        async with answering(answer) as url:
            await (await connect_sglang(url, vocab_size=200, images=images)).close()


def test_servers_that_april_starts_keep_ids() -> None:
    recipe = recipe_from_dict({"engine": {"engine": "sglang"}})
    assert KEEPS_IDS in server_options(recipe, vllm=False, gpus=0, images=True)
    assert KEEPS_IDS not in server_options(recipe, vllm=False, gpus=0)
