"""Requests of verl's vLLM replica with images, whole and resumed, on vLLM's engine: it computes the ids that verl has.

verl's replica itself does not import on a CPU. Its two steps are here: verl's function reduces the placeholders, and
vLLM gets the ids with the images.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: scripts/setup_verl.sh")
pytest.importorskip("qwen_vl_utils", reason="verl is not installed here: scripts/setup_verl.sh")

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout.utils import get_vision_placeholder_token_ids, qwen2_5_vl_dedup_image_tokens

from tests import vision
from tests.integrations.verl.trainer import save_processor_of
from tests.servers.conftest import environment, python_of

LENGTH, CUT = 24, 9


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
def test_vllm_computes_the_ids_of_whole_and_resumed_requests(tmp_path: Path, architecture: str) -> None:
    model = save_processor_of(vision.save_for_servers(tmp_path / "model", architecture), architecture)
    processor, policy = hf_processor(str(model)), AutoModelForImageTextToText.from_pretrained(model).eval()
    masked = get_vision_placeholder_token_ids(processor)
    paths = [vision.picture(tmp_path / f"{n}.png", (24 + 16 * n, 16 + 8 * n), mark=n) for n in range(2)]
    inputs, prompts = [], []
    for chosen in (paths, paths[1:]):
        parts = [part for _ in chosen for part in ({"type": "text", "text": "and"}, {"type": "image"})]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        images = [Image.open(path).convert("RGB") for path in chosen]
        inputs.append(processor(text=[text], images=images, return_tensors="pt"))
        reduced = qwen2_5_vl_dedup_image_tokens(inputs[-1]["input_ids"][0].tolist(), processor)
        prompts.append({"token_ids": reduced, "images": chosen})
    asked = {"model": str(model), "masked": masked, "length": LENGTH, "cut": CUT, "prompts": prompts}
    done = subprocess.run(
        [python_of("vllm"), "-W", "ignore", Path(__file__).with_name("vllm_requests.py")],
        input=json.dumps(asked),
        env={**os.environ, **environment(0), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    for given, (whole, rest) in zip(inputs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        ids, drawn = given.pop("input_ids")[0].tolist(), whole["token_ids"]
        resumed = [*ids, *drawn[:CUT]]
        assert whole["prompt_ids"] == ids
        assert qwen2_5_vl_dedup_image_tokens(resumed, processor)[-CUT:] == drawn[:CUT]
        assert rest["prompt_ids"] == resumed
        for before, answer in ((ids, whole), (resumed, rest)):
            length, sequence = len(answer["token_ids"]), torch.tensor([[*before, *answer["token_ids"]]])
            kinds = (sequence == vision.PLACEHOLDER).int()
            pixels, grid = given["pixel_values"], given["image_grid_thw"]
            with torch.no_grad():
                output = policy(sequence, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds)
            rows = output.logits[0, -length - 1 : -1]
            rows[:, masked] = -torch.inf
            own = rows.log_softmax(-1).gather(1, sequence[0, -length:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer["logprobs"]), own, atol=1e-4, rtol=0)
