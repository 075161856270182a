"""vLLM in this process: sleep at level 2, wake, update, log-probabilities; then TRL's colocate mode with sleep.

Not run on a GPU yet. Written for vLLM 0.26, the newest for torch 2.11; april's own engine needs a newer vLLM.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_parts.bench import Bench, prompts
from gpu_parts.train import prepared
from parts import Figures

GAP = 0.3
"""Nats between log-probabilities of vLLM and of a plain forward pass, in bfloat16. An assumption."""


def measure(bench: Bench) -> Figures:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with tempfile.TemporaryDirectory() as name:
        prepared(bench, Path(name))
        path = str(Path(name) / "model")
        yield from slept(bench, path)
        yield from colocated(bench, path)


def slept(bench: Bench, path: str) -> Figures:
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    sleeps = bench.on_gpu
    llm = LLM(path, dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.3, enable_sleep_mode=sleeps)
    ids = [list(prompt.token_ids) for prompt in prompts(8, 32, bench.shape.vocabulary)]
    sampling = SamplingParams(max_tokens=bench.size(64, 8), logprobs=0, detokenize=False)

    def gap(model: Any) -> float:
        worst = 0.0
        for given, output in zip(ids, llm.generate([{"prompt_token_ids": one} for one in ids], sampling), strict=True):
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            reported = [scored[token].logprob for token, scored in zip(tokens, completion.logprobs, strict=True)]
            with torch.inference_mode():
                whole = torch.tensor([[*given, *tokens]], device=model.device)
                logits = model(input_ids=whole).logits[0, len(given) - 1 : -1].float().log_softmax(-1)
            plain = logits.gather(1, whole[0, len(given) :, None])[:, 0].cpu()
            worst = max(worst, float((plain - torch.tensor(reported)).abs().max()))
        return worst

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(bench.device)
    gaps = {"before": gap(model)}
    yield "logprob_gap", gaps
    if sleeps:
        free = torch.cuda.mem_get_info()[0]
        began = bench.clock()
        llm.sleep(level=2)
        yield "freed_bytes", torch.cuda.mem_get_info()[0] - free
        yield "sleep_seconds", bench.clock() - began
        began = bench.clock()
        llm.wake_up(tags=["weights"])
        yield "wake_weights_seconds", bench.clock() - began
    with torch.no_grad():
        for parameter in model.parameters():  # other weights than the engine was loaded with
            parameter.mul_(1.01)
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if "lm_head" not in name]
    llm.apply_model(lambda served: served.load_weights(tensors))
    if sleeps:
        llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()
    gaps["after"] = gap(model)
    yield "logprob_gap", gaps
    yield (
        "failures",
        [f"log-probabilities {when} the update: {g:.2g} nats" for when, g in gaps.items() if not g <= GAP],
    )


def colocated(bench: Bench, path: str) -> Figures:
    """Two steps of TRL's trainer that share the device with vLLM."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=bench.size(64, 8),
        max_steps=2,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=bench.on_gpu,
        vllm_gpu_memory_utilization=0.3,
        bf16=bench.on_gpu,
        use_cpu=not bench.on_gpu,
        report_to=[],
    )
    began = bench.clock()
    trainer = GRPOTrainer(
        model=path,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7"] * 64}),
    )
    trainer.train()
    yield "trl_colocate_seconds", bench.clock() - began
