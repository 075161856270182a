"""Everything of april that needs a GPU, on one CUDA or ROCm device, within about ten minutes.

From a checkout, in an environment with a GPU build of torch and `pip install -e ".[train,trl,dev]"`:

    python benchmarks/gpu.py                          # all parts; figures go to benchmarks/gpu.json as each part ends
    python benchmarks/gpu.py --parts tests exactness  # some of them
    python benchmarks/gpu.py --device cpu --tiny      # the same code on small shapes: shows that it runs, saves nothing

Each part runs in a process of its own under a limit of its own, so that a part that fails, hangs or runs out of memory
costs its own figures only; what it said last stands in the file instead. Weights are random (nothing is fetched), and
the lengths of responses are the workload's, so that every arm generates as many tokens.

- tests: the embedded engine's tests, on this device;
- exactness: samples interrupted at random and resumed, against the same samples undisturbed: the share of equal
  responses, and how far recorded log-probabilities are from a plain forward pass;
- engine: the embedded engine against transformers' continuous batching, the shapes of Qwen3-0.6B and Qwen3-4B;
- partial: partial against synchronous rollouts at equal slots, interleaved;
- training: april's training step against TRL's loss, the same samples and the same update;
- roofline: decode steps and prefill as `april simulate` computes them from a data sheet, against what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from embedded_engine import Workload as Requests
from embedded_engine import continuous, embedded, requests_of, seconds
from record import save, spread
from training_step import SIDES
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from april.config.reading import load_recipe
from april.engines.embedded import EmbeddedEngine
from april.rollout.sampling import SamplingParams
from april.rollout.step import Plan, Step
from april.rollout.trajectory import Group, Prompt, Sample
from april.simulation.hardware import GPUS, MODELS, ModelShape, roofline
from april.simulation.measurement import serve
from april.simulation.sweep import Sweep
from april.simulation.workload import Part, Workload

ROOT = Path(__file__).parents[1]
QWEN3_06B = ModelShape(
    name="qwen3-0.6b",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    tied=True,
)
TINY = ModelShape(
    name="tiny", layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocabulary=512, tied=True
)


@dataclass(frozen=True)
class Bench:
    """What every part is told: where it runs, and the shapes and sizes it takes."""

    device: str
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def shapes(self) -> list[ModelShape]:
        return [TINY] if self.tiny else [QWEN3_06B, MODELS["qwen3-4b"]]

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def model(self, shape: ModelShape) -> PreTrainedModel:
        """A policy of this shape with random weights."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=4096,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.device(self.device):
            return Qwen3ForCausalLM(config).to(self.dtype).eval()

    def clock(self) -> float:
        """Seconds, with everything done that was asked of the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[Prompt]:
    rng = random.Random(seed)
    return [Prompt(tuple(rng.randrange(2, vocabulary) for _ in range(length)), str(i)) for i in range(count)]


def samples(bench: Bench, shape: ModelShape, tokens: int) -> list[Sample]:
    """Groups of four, each sample with a budget of its own that ends it."""
    made = []
    for i, prompt in enumerate(prompts(bench.size(8, 2), 32, shape.vocabulary)):
        for j, sample in enumerate(Group.start(i, prompt, 4, SamplingParams(), 0).samples):
            made.append(replace(sample, sampling=SamplingParams(max_tokens=tokens // 2 + (tokens * j) // 8)))
    return made


async def generate(engine: EmbeddedEngine, given: Sequence[Sample], interrupts: random.Random | None = None) -> None:
    """All of `given` to their ends; interrupted and resumed at random if `interrupts` is there."""
    by_id = {sample.id: sample for sample in given}
    while unfinished := [sample for sample in given if sample.finish is None]:
        for sample in unfinished:
            engine.submit(sample)
        for _ in range(interrupts.randint(1, 12) if interrupts else sys.maxsize):
            chunks = await engine.poll()
            for chunk in chunks:
                by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
            if not chunks:
                break
        for chunk in await engine.interrupt():
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)


@torch.inference_mode()
def logprob_error(model: PreTrainedModel, given: Sequence[Sample]) -> float:
    """The largest distance, in nats, of a recorded log-probability from that of a plain forward pass."""
    worst = 0.0
    for sample in given:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        plain = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0].cpu()
        worst = max(worst, float((plain - torch.from_numpy(sample.logprobs)).abs().max()))
    return worst


def tests(bench: Bench) -> dict[str, Any]:
    """The embedded engine's tests in float32: there a token is the same however it was batched."""
    files = ["tests/engines/test_embedded.py", "tests/engines/test_embedded_drafts.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(files if not bench.tiny else [f"{files[0]}::{NODE}"])]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"APRIL_TEST_DEVICE": bench.device}, capture_output=True, text=True
    )
    tail = done.stdout.strip().splitlines()[-15:]
    return {"passed": done.returncode == 0, "said": tail[-1:] if done.returncode == 0 else tail}


NODE = "test_interrupted_after_every_token"


def exactness(bench: Bench) -> dict[str, Any]:
    shape, tokens = bench.shapes[0], bench.size(256, 16)
    model = bench.model(shape)
    undisturbed = samples(bench, shape, tokens)
    asyncio.run(generate(EmbeddedEngine(model, max_running=16, context_length=1024), undisturbed))
    found: dict[str, Any] = {"samples": len(undisturbed), "logprob_error": logprob_error(model, undisturbed)}
    for forget in (False, True):
        again = samples(bench, shape, tokens)
        engine = EmbeddedEngine(model, max_running=16, context_length=1024)
        if forget:
            engine.interrupt = forgetting(engine)  # type: ignore[method-assign]
        asyncio.run(generate(engine, again, random.Random(1)))
        pairs = list(zip(undisturbed, again, strict=True))
        same = [one.response_ids == other.response_ids for one, other in pairs]
        apart = [
            next(i for i, (a, b) in enumerate(zip(one.response_ids, other.response_ids, strict=True)) if a != b)
            for one, other in pairs
            if one.response_ids != other.response_ids
        ]
        found["recomputed" if forget else "resumed"] = {
            "equal_responses": statistics.fmean(same),
            "first_difference_at_token": spread(apart) if apart else None,
            "logprob_error": logprob_error(model, again),
        }
    return found


def forgetting(engine: EmbeddedEngine) -> Callable[..., Any]:
    """An interrupt that drops every KV cache, as an update of the weights does."""
    interrupt = engine.interrupt

    async def interrupted() -> Any:
        chunks = await interrupt()
        engine.forget()
        return chunks

    return interrupted


def engine(bench: Bench) -> dict[str, Any]:
    found = {}
    for shape in bench.shapes:
        model = bench.model(shape)
        work = Requests(
            shape.name,
            {"vocab_size": shape.vocabulary},
            requests=bench.size(192, 8),
            slots=bench.size(64, 4),
            median=bench.size(160, 8),
            longest=bench.size(1024, 24),
            batch_tokens=bench.size(2048, 64),
        )
        asked = requests_of(work)
        useful = sum(request.budget for request in asked)
        makers = {"embedded": embedded, "continuous": continuous}
        for make in makers.values():
            make(model, work, asked[:4])()
        times: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(bench.size(3, 1)):
            for name, make in makers.items():
                times[name].append(seconds(make(model, work, asked), useful))
        found[shape.name] = {
            "useful_tokens": useful,
            "useful_tokens_per_second": {name: spread([useful / t for t in taken]) for name, taken in times.items()},
            "embedded_over_continuous": spread(
                [b / a for a, b in zip(times["embedded"], times["continuous"], strict=True)]
            ),
        }
        del model
    return found


def partial(bench: Bench) -> dict[str, Any]:
    """Steps of 32 groups of 8 on 128 slots, lengths lognormal; an update after each step drops the KV caches."""
    shape = bench.shapes[0]
    model = bench.model(shape)
    work = Workload(
        "gpu",
        (Part(bench.size(200, 8), 0.9),),
        max_tokens=bench.size(2048, 32),
        prompt_tokens=bench.size(128, 8),
        rollout_batch_size=bench.size(32, 4),
        n_samples_per_prompt=bench.size(8, 2),
    )
    size, slots = work.rollout_batch_size, bench.size(128, 4)
    arms: dict[str, dict[str, Any]] = {"synchronous": {"partial_rollout": False}}
    arms |= {f"N'/N = {ratio:g}": {"over_sampling_batch_size": int(ratio * size)} for ratio in (1.5, 2.0)}
    found: dict[str, list[Any]] = {name: [] for name in arms}
    for seed in range(bench.size(3, 1)):
        for name, settings in arms.items():
            subject = EmbeddedEngine(model, max_running=slots, context_length=bench.size(4096, 256))
            outcome = asyncio.run(
                serve(
                    subject,
                    work,
                    subject.update_weights,
                    steps=bench.size(4, 2),
                    warm_up=1,
                    vocabulary=shape.vocabulary,
                    clock=bench.clock,
                    seed=seed,
                    **settings,
                )
            )
            found[name].append(outcome)
    base = found["synchronous"]
    return {
        name: {
            "consumed_tokens_per_second": spread([o.consumed_tokens_per_second for o in outcomes]),
            "ratio_to_synchronous": spread(
                [
                    o.consumed_tokens_per_second / b.consumed_tokens_per_second
                    for o, b in zip(outcomes, base, strict=True)
                ]
            ),
            "mean_staleness": statistics.fmean(o.mean_staleness for o in outcomes),
            "occupancy": statistics.fmean(o.occupancy for o in outcomes),
        }
        for name, outcomes in found.items()
    }


def training(bench: Bench) -> dict[str, Any]:
    """One update on groups of eight with random rewards, micro-batches of as many tokens on both sides."""
    shape = bench.shapes[0]
    groups, tokens = bench.size(8, 2), bench.size(512, 16)
    recipe = load_recipe(ROOT / "examples" / "gcd" / "recipe.toml")  # its tokenizer, which TRL asks for
    recipe.rollout.n_samples_per_prompt, recipe.rollout.max_response_length = 8, 2 * tokens
    step = Step(1, Plan(groups))
    rng = random.Random(0)
    for i, prompt in enumerate(prompts(groups, bench.size(128, 8), shape.vocabulary)):
        group = Group.start(i, prompt, 8, SamplingParams(max_tokens=2 * tokens), 0)
        for sample in group.samples:
            sample.sampling = SamplingParams(max_tokens=rng.randint(tokens // 4, 2 * tokens))
            sample.reward = float(rng.random() < 0.5)
        step.groups.append(group)
    model = bench.model(shape)
    given = [sample for group in step.groups for sample in group.samples]
    asyncio.run(generate(EmbeddedEngine(model, max_running=64, context_length=4096), given))
    size = 4
    sides = {}
    for name, side in SIDES.items():
        per = size if name == "trl" else size * 2 * tokens
        sides[name] = side(bench.model(shape), copy.deepcopy(recipe), step, per)
    norms = {name: side.run() for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks = dict.fromkeys(sides, 0)
    for _ in range(bench.size(4, 1)):
        for name, side in sides.items():
            if bench.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            began = bench.clock()
            side.run()
            times[name].append(bench.clock() - began)
            peaks[name] = torch.cuda.max_memory_allocated() if bench.device != "cpu" else 0
    trained = sum(len(sample.prompt_ids) + sample.length for sample in given)
    return {
        "tokens": trained,
        "gradient_norms": norms,
        "tokens_per_second": {name: spread([trained / t for t in taken]) for name, taken in times.items()},
        "april_over_trl": spread([b / a for a, b in zip(times["april"], times["trl"], strict=True)]),
        "peak_bytes_with_both_loaded": peaks,
    }


def roofline_against_measured(bench: Bench) -> dict[str, Any]:
    name = "" if bench.device == "cpu" else torch.cuda.get_device_name().lower()
    gpu = next((gpu for key, gpu in GPUS.items() if key in name.replace(" ", "")), None)
    found: dict[str, Any] = {"data_sheet": gpu and gpu.name}
    for shape in bench.shapes:
        subject = EmbeddedEngine(bench.model(shape), max_running=bench.size(256, 4), context_length=2048)

        async def update(version: int, subject: EmbeddedEngine = subject) -> None:
            await subject.update_weights(version)

        sweep = Sweep(subject, update, "recompute", np.random.default_rng(0), shape.vocabulary, bench.clock)

        async def measure(sweep: Sweep = sweep) -> tuple[list[Any], list[Any]]:
            await sweep.decode(1, 4, 4)
            batches = (1, 16, 64, 256) if not bench.tiny else (1, 4)
            decoding = [await sweep.decode(batch, 128, bench.size(32, 4)) for batch in batches]
            return decoding, [await sweep.prefill((length,)) for length in (128, bench.size(1024, 128))]

        decoding, prefill = asyncio.run(measure())
        cost = roofline(gpu, shape) if gpu else None
        found[shape.name] = {
            "decode_step_seconds": [
                {
                    "batch": m.batch,
                    "measured": m.seconds,
                    "roofline": cost and float(cost.base(m.batch)[m.batch]) + cost.kv_token_seconds * m.kv_tokens,
                }
                for m in decoding
            ],
            "prefill_seconds": [
                {
                    "tokens": sum(m.lengths),
                    "measured": m.seconds,
                    "roofline": cost
                    and sum(n * cost.prefill_token_seconds + n * n * cost.prefill_pair_seconds for n in m.lengths),
                }
                for m in prefill
            ],
        }
    return found


PARTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], int]] = {
    "tests": (tests, 150),
    "exactness": (exactness, 60),
    "engine": (engine, 150),
    "partial": (partial, 120),
    "training": (training, 90),
    "roofline": (roofline_against_measured, 60),
}
"""Each part with its limit in seconds."""


def run_apart(name: str, bench: Bench) -> dict[str, Any]:
    """A part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(out), "--device", bench.device]
        command += ["--tiny"] if bench.tiny else []
        began, limit = time.perf_counter(), PARTS[name][1]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit} s"}
        taken = {"seconds": round(time.perf_counter() - began, 1)}
        if done.returncode or not out.exists():
            return {"failed": (done.stderr or done.stdout).strip().splitlines()[-8:]} | taken
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures | taken


def device_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "cpu"}
    facts = torch.cuda.get_device_properties(0)
    return {"name": facts.name, "memory": facts.total_memory, "cuda": torch.version.cuda, "hip": torch.version.hip}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too) or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, nothing saved")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    bench = Bench(options.device, options.tiny)
    if options.part:
        options.out.write_text(json.dumps(PARTS[options.part][0](bench)))
        return
    if bench.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: install its CUDA or ROCm build, or try the script by --device cpu --tiny")
    results: dict[str, Any] = {"device": device_facts(bench.device)}
    for name in options.parts:
        results[name] = run_apart(name, bench)
        print(json.dumps({name: results[name]}, indent=2), flush=True)
        if not bench.tiny:
            save(__file__, results)
    failed = [name for name in options.parts if "failed" in results[name] or results[name].get("passed") is False]
    print(f"{len(options.parts) - len(failed)} parts done{', not: ' + ', '.join(failed) if failed else ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
