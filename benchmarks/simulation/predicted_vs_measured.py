"""Predicted against measured consumed tokens/s, on a real engine.

The engine is calibrated first, as `april calibrate` does it. Then each setting runs twice: in virtual time on the
fitted cost model, and for real. Both get the same samples with the same lengths: a thin layer in front of the real
engine gives each sample, as its budget, the length that the workload says it has, so that what differs is the cost
model and nothing else. Policy and prompts are random; what is generated means nothing.

    OMP_NUM_THREADS=1 python benchmarks/simulation/predicted_vs_measured.py --engine embedded
    OMP_NUM_THREADS=1 python benchmarks/simulation/predicted_vs_measured.py --engine vllm --python PYTHON_OF_VLLM
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april import RolloutScheduler, Sample, SamplingParams
from april.engine import Capacity, Chunk, Engine
from april.engines.embedded import EmbeddedEngine
from april.simulation.calibration import calibrate
from april.simulation.run import no_reward, simulate
from april.simulation.workload import Part, Workload

CONTEXT, VOCABULARY, SLOTS = 576, 512, 32
WORKLOAD = Workload(
    "benchmark",
    (Part(40, 0.8),),
    max_tokens=256,
    correlation=0.6,
    prompt_tokens=48,
    rollout_batch_size=12,
    n_samples_per_prompt=4,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous, N = 12": {"partial_rollout": False},
    "synchronous, N = 24": {"partial_rollout": False, "rollout_batch_size": 24},
    "N' = 15, N = 12": {"over_sampling_batch_size": 15},
    "N' = 18, N = 12": {"over_sampling_batch_size": 18},
    "N' = 24, N = 12": {"over_sampling_batch_size": 24},
    "N' = 36, N = 12": {"over_sampling_batch_size": 36},
    "N' = 12, N = 6": {"over_sampling_batch_size": 12, "rollout_batch_size": 6},
    "N' = 36, N = 24": {"over_sampling_batch_size": 36, "rollout_batch_size": 24},
}

CLOCKS = {"embedded": time.process_time, "vllm": time.perf_counter, "sglang": time.perf_counter}
"""The embedded engine runs in this process on one thread and waits for nothing, so its CPU time is what its wall clock
would be on a machine of its own; that keeps other processes' time slices out of calibration and measurement alike."""


class GivenLengths:
    """A real engine whose samples have the lengths of a workload: its budget ends each of them there."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self.engine = engine
        self.workload = workload

    @property
    def capacity(self) -> Capacity:
        return self.engine.capacity

    @property
    def running(self) -> int:
        return self.engine.running

    def submit(self, sample: Sample) -> None:
        number = sample.prompt_ids[0]
        length = self.workload.lengths(np.array([number]), np.array([sample.seed], np.uint64))[0]
        ids = np.random.default_rng(number).integers(2, VOCABULARY, len(sample.prompt_ids))
        sampling = dataclasses.replace(sample.sampling, max_tokens=int(length))
        self.engine.submit(dataclasses.replace(sample, prompt_ids=tuple(ids.tolist()), sampling=sampling))

    async def poll(self) -> list[Chunk]:
        return await self.engine.poll()

    async def interrupt(self) -> list[Chunk]:
        return await self.engine.interrupt()

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self.engine.update_weights(version, weights)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self.engine.forget(sample_ids)

    async def close(self) -> None:
        await self.engine.close()


def policy(layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


@asynccontextmanager
async def engine_of(args: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[Engine, Any]]:
    """The engine, and what `update_weights` is to be given."""
    model = policy(args.layers)
    if args.engine == "embedded":
        engine = EmbeddedEngine(model, max_running=SLOTS, context_length=CONTEXT, on_update="recompute")
        yield engine, None
        await engine.close()
        return
    from april.engines.launch import launch_sglang, launch_vllm
    from april.engines.sglang import SGLangEngine
    from april.engines.vllm import VLLMEngine

    weights = folder / "model"
    model.save_pretrained(weights)
    common: dict[str, Any] = {"log_dir": folder, "python": args.python}
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if args.engine == "vllm":
        core = str(min(os.sched_getaffinity(0)))
        arguments = ["--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--block-size", "32"]
        arguments += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
        arguments += ["--kv-cache-memory-bytes", str(2**27)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = core
        server, kind = launch_vllm(weights, arguments=arguments, environment=environment, **common), VLLMEngine
    else:
        arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        arguments += ["--disable-overlap-schedule", "--disable-cuda-graph", "--dtype", "float32"]
        arguments += ["--max-total-tokens", "32768", "--mem-fraction-static", "0.1", "--skip-tokenizer-init"]
        arguments += ["--max-running-requests", str(SLOTS), "--context-length", str(CONTEXT)]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(args.shims.resolve())}
        server, kind = launch_sglang(weights, arguments=arguments, environment=environment, **common), SGLangEngine
    async with server as started:
        engine = await kind.connect(started.url, on_update="recompute")
        yield engine, weights
        await engine.close()


async def measure(engine: Engine, weights: Any, args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, float]:
    limited = GivenLengths(engine, WORKLOAD)
    scheduler = RolloutScheduler(
        limited,
        WORKLOAD.prompts(),
        no_reward,
        **{
            "rollout_batch_size": WORKLOAD.rollout_batch_size,
            "n_samples_per_prompt": WORKLOAD.n_samples_per_prompt,
            "sampling": SamplingParams(max_tokens=WORKLOAD.max_tokens),
            "reward_scope": "group",
            **settings,
        },
    )
    clock = CLOCKS[args.engine]
    consumed = generated = 0
    seconds, staleness = 0.0, []
    async with scheduler:
        # A scheduler counts versions from 0; an engine that served another before is told so.
        await engine.update_weights(0, weights)
        for number in range(args.steps):
            began = clock()
            step = await scheduler.collect()
            await scheduler.update_weights(weights)
            if number >= args.warm_up:
                seconds += clock() - began
                consumed += step.consumed_tokens
                generated += step.sampled_tokens
                staleness.append(float(step.staleness.mean()))
    engine.forget()
    return {
        "consumed_tokens_per_second": consumed / seconds,
        "generated_tokens_per_second": generated / seconds,
        "mean_staleness": float(np.mean(staleness)),
        "seconds": seconds,
    }


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with engine_of(args, Path(folder)) as (engine, weights):

            async def update(version: int) -> None:
                await engine.update_weights(version, weights)

            began = time.perf_counter()
            swept = await calibrate(
                engine, update=update, longest=args.longest, vocabulary=VOCABULARY, clock=CLOCKS[args.engine]
            )
            cost = await asyncio.to_thread(swept.fit, f"measured: {args.engine}")
            print(f"calibrated in {time.perf_counter() - began:.0f} s, errors {cost.errors}", flush=True)
            for name, settings in SETTINGS.items():
                measured = await measure(engine, weights, args, settings)
                results[name] = {"measured": measured}
                print(f"{name}: measured {measured['consumed_tokens_per_second']:,.0f}", flush=True)
    for name, settings in SETTINGS.items():
        outcome = await asyncio.to_thread(
            simulate, WORKLOAD, cost, steps=args.steps, warm_up=args.warm_up, on_update="recompute", **settings
        )
        measured, predicted = results[name]["measured"], outcome.consumed_tokens_per_second
        error = predicted / measured["consumed_tokens_per_second"] - 1
        results[name] |= {
            "predicted": {
                "consumed_tokens_per_second": predicted,
                "generated_tokens_per_second": outcome.generated_tokens_per_second,
                "mean_staleness": outcome.mean_staleness,
                "seconds": outcome.rollout_seconds,
            },
            "error": error,
        }
        print(
            f"{name}: predicted {predicted:,.0f}, measured {measured['consumed_tokens_per_second']:,.0f} ({error:+.1%})"
        )
    return {
        "cost_model": dataclasses.asdict(cost),
        "settings": results,
        "clock": "CPU time of the process" if args.engine == "embedded" else "wall clock",
        "largest_error": max(abs(result["error"]) for result in results.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    parser.add_argument("--python", type=Path, help="interpreter of the server's environment")
    parser.add_argument("--shims", type=Path, default=Path("tests/servers/sglang_cpu"), help="SGLang without CUDA")
    parser.add_argument("--layers", type=int, default=2, help="of the policy")
    parser.add_argument("--longest", type=int, default=192, help="longest prompt of the calibration")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = asyncio.run(compare(args))
    where = Path(__file__).with_stem(f"{Path(__file__).stem}_{args.engine}")
    print(save(str(where), {**results, "steps": args.steps, "warm_up": args.warm_up}))


if __name__ == "__main__":
    main()
