"""A stand-in for SGLang's server whose policy reads images. Requests are processed by SGLang's own code."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from slime.utils.processing_utils import load_processor
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.integrations.model_server import SGLangServer
from tests.vision import PLACEHOLDER, TOKEN

UNDRAWN = [PLACEHOLDER, TOKEN["<|video_pad|>"]]
"""Tokens that no policy here draws, unless a test has it."""

SETTINGS = {
    "mm_process_config": {},
    "skip_tokenizer_init": False,
    "keep_mm_feature_on_device": False,
    "disable_fast_image_processor": True,
}
"""What SGLang's processor reads of the server's arguments."""


class Policy:
    """A model that reads images, with its logits of placeholders at minus infinity."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.config = self.model.config.text_config

    def __call__(self, tokens: Tensor, **inputs: Tensor) -> Any:
        kinds = torch.zeros_like(tokens, dtype=torch.int)
        if inputs:
            kinds[tokens == PLACEHOLDER] = 1
        output = self.model(tokens, mm_token_type_ids=kinds, **inputs)
        output.logits[..., UNDRAWN] = -torch.inf
        return output


class Picture(SimpleNamespace):
    """What SGLang made of a request: ids with all placeholders, and the model's inputs for its images."""

    ids: list[int]
    inputs: dict[str, Tensor]
    reported: bool


picture: ContextVar[Picture] = ContextVar("picture")


class VisionServer(SGLangServer):
    """A server that is its own router.

    Args:
        scale: factor of the logits; a large one leaves no choice of tokens.
    """

    def __init__(self, path: Path, scale: float = 1.0, **settings: Any) -> None:
        self.scale = scale
        config = AutoConfig.from_pretrained(path)
        self.processor = QwenVLImageProcessor(config, SimpleNamespace(**SETTINGS), load_processor(str(path)), "default")
        self.requests: list[tuple[list[int], int]] = []
        """Ids of each request as it came, and the number of its images."""
        super().__init__(path, **settings)

    def _policy(self, path: Path) -> _Seeing:
        return _Seeing(Policy(path), self.scale)

    def _routes(self, router: web.UrlDispatcher) -> None:
        super()._routes(router)
        router.add_get("/workers", self._workers)

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.url, "worker_type": "regular"}]})

    async def _load(self, request: web.Request) -> web.Response:
        assert not self.running, "weights change while requests run"
        call = await request.json()
        self.weight_version = call["weight_version"]
        self.model = self._policy(Path(call["model_path"]))
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> Any:
        body = await request.json()
        given, images = body.get("text") or body["input_ids"], body.get("image_data") or []
        ids, inputs = given, {}
        if images:
            other = SimpleNamespace(video_data=None, audio_data=None, rid="")
            made = await self.processor.process_mm_data_async(image_data=images, input_text=given, request_obj=other)
            ids = made.input_ids
            inputs = {
                "pixel_values": torch.cat([item.feature for item in made.mm_items]),
                "image_grid_thw": torch.cat([item.image_grid_thw for item in made.mm_items]),
            }
        self.requests.append((given, len(images)))
        picture.set(Picture(ids=ids, inputs=inputs, reported=body.get("return_prompt_token_ids", False)))
        id = body.get("rid", f"framework-{self.asked}")
        return await self._respond(request, id, body["sampling_params"], body.get("stream", False), ids)

    def _event(self, new: list[tuple[int, float]], drawn: list[tuple[int, float]], reason: str | None) -> Any:
        event = {
            **super()._event(new, drawn, reason),
            "text": self.processor._tokenizer.decode([id for id, _ in drawn]),
        }
        event["meta_info"]["prompt_tokens"] = len(picture.get().ids)
        return event | ({"prompt_token_ids": picture.get().ids} if picture.get().reported else {})


class _Seeing:
    """A policy with the images of the request that calls it."""

    def __init__(self, policy: Policy, scale: float) -> None:
        self._policy, self._scale = policy, scale
        self.config = policy.config

    def __call__(self, tokens: Tensor) -> Any:
        output = self._policy(tokens, **picture.get().inputs)
        output.logits *= self._scale
        return output
