"""A generate function for the tests, as slime's examples write them, and rewards for its samples and theirs."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

STOPS = ["q", "</answer>"]
TURNS = 3
calls: list[int] = []
"""Indices of the samples that the function was called for."""


async def talk(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Up to three turns over tokens, each ended by an end token or a stop string."""
    assert not args.partial_rollout
    calls.append(sample.index)
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(TURNS):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": {**sampling_params, "stop": STOPS, "max_new_tokens": 40},
            "return_logprob": True,
        }
        output = await post(url, payload)
        drawn = output["meta_info"]["output_token_logprobs"]
        ids = [id for _, id, _ in drawn]
        assert ids == output["output_ids"]
        assert output["text"] == tokenizer.decode(ids, skip_special_tokens=args.rollout_skip_special_tokens)
        reason = output["meta_info"]["finish_reason"]
        if reason["type"] == "length":
            assert len(ids) == 40
        elif isinstance(reason["matched"], str):
            assert reason["matched"] in STOPS
            assert output["text"].endswith(reason["matched"])
            assert output["text"].count(reason["matched"]) == 1
        sample.append_response_tokens(
            args, tokens=ids, log_probs=[p for p, _, _ in drawn], meta_info=output["meta_info"], text=output["text"]
        )
        if turn + 1 < TURNS:
            said = f" turn {turn}: "
            sample.append_response_tokens(
                args, tokens=tokenizer(said, add_special_tokens=False)["input_ids"], trainable=False, text=said
            )
    sample.tool_calls = TURNS - 1
    return sample


async def talk_in_text(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns over text, tokenized again, without log-probabilities, and with a token behind each response."""
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    sample.tokens, sample.loss_mask, text = encode(sample.prompt), [], sample.prompt
    for _ in range(2):
        output = await post(url, {"text": text, "sampling_params": {**sampling_params, "skip_special_tokens": False}})
        said = encode(output["text"]) + encode("\n")
        told = encode(" again: ")
        sample.tokens += [*said, *told]
        sample.loss_mask += [1] * len(said) + [0] * len(told)
        text += f"{output['text']}\n again: "
    sample.response_length = len(sample.loss_mask)
    sample.response = text[len(sample.prompt) :]
    sample.status = Sample.Status.COMPLETED
    return sample


async def failing(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks for a response that april does not draw."""
    await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {"text": sample.prompt, "sampling_params": {**sampling_params, "temperature": 0.5}},
    )
    return sample


async def parity(args: Namespace, sample: Sample, **_: Any) -> float:
    """A custom reward model."""
    assert sample.tool_calls == TURNS - 1
    return float(sum(sample.loss_mask) % 2)


async def lengths(args: Namespace, samples: Any, **_: Any) -> Any:
    """A custom reward model that takes one sample or several."""
    several = isinstance(samples, list)
    values = [float(sample.response_length % 2) for sample in (samples if several else [samples])]
    return values if several else values[0]
