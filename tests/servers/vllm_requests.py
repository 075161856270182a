"""Requests with images in the form of verl's vLLM replica, on vLLM's engine in this process; vLLM's Python runs it.

Reads JSON from standard input, and writes the answers as the last line: two for each prompt, the whole response, and
the rest of it after `cut` tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main() -> None:
    asked = json.load(sys.stdin)
    engine = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=2**25,
        max_model_len=256,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 2, "video": 0},
        logprobs_mode="processed_logprobs",
    )
    masked = dict.fromkeys(asked["masked"], -100.0)

    def answer(token_ids: list[int], images: list[Any], length: int) -> dict[str, Any]:
        sampling = SamplingParams(seed=3, max_tokens=length, logprobs=0, ignore_eos=True, logit_bias=masked)
        prompt = TokensPrompt(prompt_token_ids=token_ids, multi_modal_data={"image": images})
        (request,) = engine.generate([prompt], sampling, use_tqdm=False)
        (output,) = request.outputs
        drawn = list(output.token_ids)
        logprobs = [place[token].logprob for place, token in zip(output.logprobs, drawn, strict=True)]
        return {"prompt_ids": request.prompt_token_ids, "token_ids": drawn, "logprobs": logprobs}

    answers, length, cut = [], asked["length"], asked["cut"]
    for prompt in asked["prompts"]:
        images = [Image.open(path).convert("RGB") for path in prompt["images"]]
        whole = answer(prompt["token_ids"], images, length)
        rest = answer([*prompt["token_ids"], *whole["token_ids"][:cut]], images, length - cut)
        answers.append([whole, rest])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
