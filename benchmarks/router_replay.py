"""What router replay brings and costs: log-probabilities of engine and trainer, bytes of routes, and time.

    python benchmarks/router_replay.py [--groups 6] [--pairs 15] [--part all]

1. Tiny policies of three architectures (four layers, 4 of 16 experts), in float32 and bfloat16, sampled by the embedded
   engine. Responses are interrupted by 0 to 5 weight updates of AdamW. For each setting the mean absolute difference of
   the log-probability of a token in the engine and in the trainer, by the weights of the version that drew the token,
   and by the newest weights, from which a step trains; and the share of (token, layer) pairs for which the trainer's
   routers, by the newest weights, choose other experts than the recorded ones.
2. Bytes of a token's routes in memory, journal and checkpoint, and processor seconds of a gigabyte of them.
3. Processor seconds of generation and of a step of training, of a larger policy, with replay and without, in turn, in
   many short pairs, so that other load on the machine meets both.

A single part is measured again with `--part`; its figures then replace those in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save, spread

from april import Chunk, Group, Prompt, RolloutBatch, Sample, SamplingParams
from april.algorithms.batch import Batch
from april.engines.embedded import EmbeddedEngine
from april.rollout.batch import Plan
from april.rollout.journal.records import decode, encode
from april.rollout.state_files import pack_state, read_state, write_state
from april.rollout.trajectory.routes import RouteRows
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.router_replay import replayed_routes
from tests.mixtures import ARCHITECTURES, as_sets, mixture, routes
from tests.training.steps import recipe

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts_per_tok": 4}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16}
UPDATES = range(6)
RATE = 3e-4
PROMPT, RESPONSE = 16, 96
SETTINGS = ("off", "recorded", "latest")


def policy_of(architecture: str, **sizes: Any) -> Any:
    names = ARCHITECTURES[architecture]
    experts = {name: count for name, count in EXPERTS.items() if name in names}
    return mixture(architecture, sharpness=4.0, **SIZES | experts | sizes)


def learner(policy: Any, dtype: str, replay: str = "recorded", rate: float = RATE) -> LocalLearner:
    made = recipe()
    made.model.compute_dtype = dtype  # type: ignore[assignment]
    made.rollout.max_response_length = RESPONSE
    made.training.router_replay = replay  # type: ignore[assignment]
    made.training.learning_rate = rate
    return LocalLearner(policy, LearnerSettings.of(made))


def groups_of(count: int, size: int = 4, response: int = RESPONSE) -> list[Group]:
    rng = np.random.default_rng(0)
    return [
        Group.start(i, Prompt(tuple(rng.integers(1, 61, PROMPT).tolist())), size, SamplingParams(response), 7)
        for i in range(count)
    ]


def take(samples: Iterable[Sample], chunks: Iterable[Chunk], latest: bool) -> None:
    by_id = {sample.id: sample for sample in samples}
    for chunk in chunks:
        sample = by_id[chunk.sample_id]
        sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        if chunk.routes is not None:
            sample.route(chunk.routes, chunk.version, latest)


async def generate(
    engine: EmbeddedEngine, samples: list[Sample], most: int | None = None, latest: bool = False
) -> None:
    """Generate until all have finished, or have `most` tokens."""
    for sample in samples:
        if sample.finish is None:
            engine.submit(sample)
    while any(sample.finish is None and (most is None or sample.length < most) for sample in samples):
        take(samples, await engine.poll(), latest)
    take(samples, await engine.interrupt(), latest)


def step_of(groups: list[Group], version: int) -> RolloutBatch:
    for group in groups:
        for sample in group.samples:
            sample.reward = float(sample.index % 2)
    return RolloutBatch(version, Plan(len(groups)), groups)


@torch.no_grad()
def logprobs(subject: LocalLearner, samples: list[Sample], replayed: bool) -> list[np.ndarray[Any, Any]]:
    batch = Batch.of(samples, 0)
    if replayed:
        assert subject.replay is not None
        batch = replace(batch, routes=replayed_routes(samples, subject.replay))
    with subject.packed():
        scores = subject._score(subject.logprobs, batch)
    return [row[mask].numpy() for row, mask in zip(scores, batch.mask, strict=True)]


def differences(architecture: str, dtype: str, on_update: str, updates: int, groups: int) -> dict[str, Any]:
    """Sample with `updates` updates in between, once for each kind of routes: both sample the same tokens."""
    found: dict[str, Any] = {}
    for kind in ("recorded", "latest"):
        subject = learner(policy_of(architecture), dtype)
        weights = [copy.deepcopy(subject.model.state_dict())]
        engine = EmbeddedEngine(
            subject.served,
            kv_cache_bytes=1 << 27,
            max_num_seqs=64,
            on_update=on_update,  # type: ignore[arg-type]
            router_replay=kind,  # type: ignore[arg-type]
        )
        made = groups_of(groups)
        samples = [sample for group in made for sample in group.samples]
        trained = groups_of(2)

        async def run(
            engine: EmbeddedEngine = engine,
            samples: list[Sample] = samples,
            subject: LocalLearner = subject,
            weights: list[Any] = weights,
            trained: list[Group] = trained,
            latest: bool = kind == "latest",
        ) -> None:
            await generate(engine, [s for group in trained for s in group.samples])
            engine.forget()
            for version in range(1, updates + 1):
                await generate(engine, samples, RESPONSE * version // (updates + 1), latest)
                subject.train(step_of(trained, 0), version)
                weights.append(copy.deepcopy(subject.model.state_dict()))
                await engine.update_weights(version)
            await generate(engine, samples, latest=latest)

        asyncio.run(run())
        drawn, versions = [s.logprobs for s in samples], [s.versions for s in samples]
        for setting in ("off", kind):
            errors: list[Any] = []
            for version in range(updates + 1):
                subject.model.load_state_dict(weights[version])
                scores = logprobs(subject, samples, setting != "off")
                own = zip(scores, drawn, versions, strict=True)
                errors.append([np.abs(a - b)[v == version] for a, b, v in own])
                if version == updates:
                    newest = [np.abs(a - b) for a, b in zip(scores, drawn, strict=True)]
            found[setting] = {
                "drawing_version": float(np.concatenate([part for parts in errors for part in parts]).mean()),
                "last_piece": float(np.concatenate(errors[-1]).mean()),
                "newest_version": float(np.concatenate(newest).mean()),
            }
        found[f"{kind}_differ_from_newest"] = routed_otherwise(subject, samples)
        found[f"{kind}_missing"] = sum(sample.missing_routes for sample in samples)
    return found


@torch.no_grad()
def routed_otherwise(subject: LocalLearner, samples: list[Sample]) -> float:
    """Share of (token, layer) pairs whose experts, as sets, the model's routers now choose otherwise."""
    other = total = 0
    for sample in samples[:8]:
        assert sample.routes is not None
        now = routes(subject.model, [*sample.prompt_ids, *sample.response_ids])[:-1]
        differing = (as_sets(now) != as_sets(sample.routes.experts)).any(-1)
        other, total = other + int(differing.sum()), total + differing.size
    return other / total


def bytes_of_a_token() -> dict[str, Any]:
    """Bytes by place, of routes of the shape of Qwen3-30B-A3B (48 layers, 8 of 128 experts)."""
    policy = policy_of("Qwen3Moe", num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, hidden_size=16)
    made = groups_of(1, 2)
    samples, journaled, plain = made[0].samples, 0, 0
    engine = EmbeddedEngine(policy, kv_cache_bytes=1 << 26, router_replay="recorded")

    async def run() -> None:
        nonlocal journaled, plain
        for sample in samples:
            engine.submit(sample)
        while chunks := await engine.poll():
            journaled += sum(len(record.content) for record in encode(chunks, 1))
            plain += sum(len(record.content) for record in encode([c._replace(routes=None) for c in chunks], 1))
            take(samples, chunks, False)

    asyncio.run(run())
    tokens = sum(len(sample.prompt_ids) + sample.length for sample in samples)
    rows = sum(sample.routes.nbytes for sample in samples if sample.routes is not None)
    text, pieces = pack_state(made[0].to_dict())
    for sample in samples:
        sample.routes = None
    without = len(json.dumps(made[0].to_dict()))
    return {
        "tokens": tokens,
        "prompt_tokens": sum(len(sample.prompt_ids) for sample in samples),
        "memory": rows / tokens,
        "journal": (journaled - plain) / tokens,
        "journal_without": plain / tokens,
        "checkpoint": (len(text) + sum(map(len, pieces)) - without) / tokens,
        "checkpoint_without": without / tokens,
    }


def seconds_of_a_gigabyte(samples: int = 64, tokens: int = 4096) -> dict[str, Any]:
    """Processor seconds of a gigabyte of routes, by what is done with them."""
    rng = np.random.default_rng(0)
    group = groups_of(1, samples, tokens)[0]
    chunks = []
    for sample in group.samples:
        sample.extend([5] * tokens, [-0.5] * tokens, 0)
        rows = RouteRows(0, rng.integers(0, 128, (PROMPT + tokens - 1, 48, 8), np.uint8))
        sample.route(rows, 0, False)
        chunks.append(Chunk(sample.id, [], [], 0, routes=rows))
    gigabytes = sum(sample.routes.nbytes for sample in group.samples if sample.routes is not None) / 1e9
    found: dict[str, Any] = {}

    def timed(name: str, work: Any) -> Any:
        began = time.thread_time()
        result = work()
        found[name] = (time.thread_time() - began) / gigabytes
        return result

    with tempfile.TemporaryDirectory() as folder:
        state = timed("checkpoint_capture", group.to_dict)
        timed("checkpoint_write", lambda: write_state(Path(folder, "state"), state))
        again = timed("checkpoint_read", lambda: read_state(Path(folder, "state")))
        assert Group.from_dict(again) == group
    records = timed("journal_encode", lambda: list(encode(chunks, 1)))
    timed("journal_decode", lambda: [event for record in records for event in decode(record)])
    for sample in group.samples:
        sample.routes = None
    found["tokens_of_a_gigabyte"] = round(samples * tokens / gigabytes)
    state = timed("checkpoint_capture_without_routes", group.to_dict)
    timed("checkpoint_json_without_routes", lambda: json.dumps(state))
    return found


def cost(pairs: int) -> dict[str, Any]:
    """Processor seconds of generation and of a training step, with routes and without them, in alternation."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "moe_intermediate_size": 256, "vocab_size": 4096}
    policy = policy_of("Qwen3Moe", **sizes)
    seconds: dict[str, list[float]] = {f"{part} {s}": [] for part in ("generation", "training") for s in SETTINGS[:2]}
    engines = {s: EmbeddedEngine(policy, kv_cache_bytes=1 << 28, router_replay=s) for s in SETTINGS[:2]}  # type: ignore[arg-type]
    learners = {s: learner(copy.deepcopy(policy), "float32", s, 1e-6) for s in SETTINGS[:2]}
    for pair in range(pairs + 1):
        steps: dict[str, RolloutBatch] = {}
        # In turn, so that a load of the machine that changes meets both, and on the same samples.
        for setting in SETTINGS[:2] if pair % 2 else SETTINGS[1::-1]:
            made = groups_of(2, response=48)
            began = time.process_time()
            asyncio.run(generate(engines[setting], [s for group in made for s in group.samples]))
            if pair:  # the first one warms up
                seconds[f"generation {setting}"].append(time.process_time() - began)
            engines[setting].forget()
            steps[setting] = step_of(made, 0)
        for setting in SETTINGS[:2] if pair % 2 else SETTINGS[1::-1]:
            began = time.process_time()
            learners[setting].train(steps["recorded"], 1)
            if pair:
                seconds[f"training {setting}"].append(time.process_time() - began)
    found: dict[str, Any] = {name: spread(values) for name, values in seconds.items()}
    for part in ("generation", "training"):
        both = zip(seconds[f"{part} recorded"], seconds[f"{part} off"], strict=True)
        ratios = sorted(replayed / plain for replayed, plain in both)
        found[f"{part} ratio"] = spread(ratios) | {"quartiles": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]]}
        found[f"{part} ratio of least"] = min(seconds[f"{part} recorded"]) / min(seconds[f"{part} off"])
    found["parameters"] = sum(p.numel() for p in policy.parameters())
    return found


def all_differences(groups: int) -> dict[str, Any]:
    """The differences of all architectures, types, engines and numbers of updates, by name."""
    found: dict[str, Any] = {}
    for architecture in ARCHITECTURES:
        for dtype in ("float32", "bfloat16"):
            for on_update in ("recompute", "keep"):
                for updates in UPDATES:
                    if on_update == "keep" and not updates:
                        continue
                    name = f"{architecture} {dtype} {on_update} {updates}"
                    found[name] = differences(architecture, dtype, on_update, updates, groups)
                    print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help="groups of four samples")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--part", choices=("all", "bytes", "cost"), default="all", help="measure this alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).with_suffix(".json")
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() and given.part != "all" else {}
    for name in ("command", "machine"):
        results.pop(name, None)
    if given.part in ("all", "bytes"):
        results |= {"bytes": bytes_of_a_token(), "seconds_of_a_gigabyte": seconds_of_a_gigabyte()}
    if given.part == "all":
        results["differences"] = all_differences(given.groups)
    if given.part in ("all", "cost"):
        results["cost"] = cost(given.pairs)
    print(json.dumps({name: results[name] for name in results if name != "differences"}))
    save(__file__, results)


if __name__ == "__main__":
    main()
