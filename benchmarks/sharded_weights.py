"""Transfer of weights from a policy that is sharded over ranks to engines: duration, and peak memory of rank 0.

Two ranks hold a Qwen3 of 50M parameters in float32 (FSDP2, gloo), two engines take it in bfloat16, each in its own
process. Three ways, as `engine.weight_transfer` and the engine's kind choose them: a broadcast over a process group, a
directory in memory (/dev/shm), and tensors in the leader's process. Each engine returns a checksum of all its weights,
which must equal the policy's. Peak memory is the resident memory of rank 0 above its memory before, after its allocator
has returned unused memory. For comparison, the same policy saved as a checkpoint, with its optimizer.

    OMP_NUM_THREADS=1 python benchmarks/sharded_weights.py
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import save, spread
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.config.recipe import Recipe
from april.engines.servers.weight_group import join
from april.engines.weight_transfer import Meeting, Receiver
from april.training.distributed_learner import DistributedLearner, follow_commands
from april.training.embedded_engine import embedded
from april.training.learner_settings import LearnerSettings
from april.training.rank_engine import FollowerEngine
from april.training.rank_protocol import RENDEZVOUS
from april.training.ranks import Ranks, join_ranks
from april.training.sharded import BUCKET_BYTES, ShardedLearner

ENGINES = 2
WAYS = ("broadcast", "directory", "tensors")


def policy(hidden: int) -> Qwen3ForCausalLM:
    """Of 47.5M parameters with `hidden` = 512."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=16000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


class Tokenizer:
    """Further parts of a checkpoint, which are not needed here."""

    eos_token_id = 1
    save_pretrained = staticmethod(lambda directory: None)


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Of all tensors' bytes, whatever their order."""
    sums = (zlib.crc32(name.encode() + t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors)
    return sum(sums) & 0xFFFFFFFF


def engine() -> None:
    """Receive weights by the commands on standard input, and answer each line when it is done."""
    group: Any = None
    held: dict[str, Tensor] = {}
    for line in sys.stdin:
        order, told = json.loads(line)
        answer: Any = None
        if order == "join":
            group = join(Meeting(**told), timedelta(seconds=60))
        elif order == "receive":
            kinds = [getattr(torch, kind) for kind in told["dtypes"]]
            sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, told["shapes"], strict=True)]
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.broadcast(packed, src=0, group=group)
            for name, kind, shape, part in zip(told["names"], kinds, told["shapes"], packed.split(sizes), strict=True):
                held[name] = part.view(kind).view(shape)
        elif order == "load":
            for path in Path(told).glob("*.safetensors"):
                held |= load_file(path)
        elif order == "checksum":
            answer = checksum(held.items())
            held.clear()
        print(json.dumps(answer), flush=True)


class Engine:
    """One of the processes that take weights."""

    def __init__(self, number: int) -> None:
        command = [sys.executable, __file__, "--part", "engine"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{number + 1}"

    def _ask(self, order: str, told: Any = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([order, told]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    async def ask(self, order: str, told: Any = None) -> Any:
        return await asyncio.to_thread(self._ask, order, told)

    def receiver(self) -> Receiver:
        async def nothing() -> None: ...

        return Receiver(
            self.url,
            self.url,
            1,
            1,
            lambda meeting: self.ask("join", asdict(meeting)),
            nothing,
            lambda _, bucket: self.ask("receive", asdict(bucket)),
            nothing,
        )


def peak() -> int:
    """The most memory this process held since the last `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def forget_peak() -> int:
    """What this process holds, without what its allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def rank(rounds: int, hidden: int, out: Path) -> None:
    recipe = Recipe()
    recipe.model.compute_dtype = "bfloat16"
    recipe.engine.engine = "vllm"
    with join_ranks("cpu", 120) as ranks:
        torch.set_num_threads(1)
        learner = ShardedLearner(policy(hidden), LearnerSettings.of(recipe), ranks, Tokenizer())
        if not ranks.leads:
            follow_commands(
                learner, ranks, FollowerEngine(lambda: embedded(recipe, learner.served, beside_trainer=True), ranks)
            )
            return
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in learner.model.parameters())}
        engines = [Engine(number) for number in range(ENGINES)]
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place, leader(learner, ranks, place) as leads:
            expected = checksum(leads.weights(0))
            for way in WAYS:
                sender = leader(learner, ranks, place, way)
                found[way] = asyncio.run(measured(way, sender, engines, rounds, expected))
            found["checkpoint"] = checkpoint(leads, Path(place), rounds)
        for one in engines:
            one.process.kill()
        out.write_text(json.dumps(found))


def leader(learner: ShardedLearner, ranks: Ranks, place: str, way: str = "tensors") -> DistributedLearner:
    recipe = Recipe()
    recipe.engine.engine = "vllm-inproc" if way == "tensors" else "vllm"
    recipe.engine.weight_transfer = "broadcast" if way == "broadcast" else "disk"
    learner.settings = replace(learner.settings, engine=recipe.engine)
    return DistributedLearner(learner, ranks, Path(place))


async def measured(
    way: str, leader: DistributedLearner, engines: list[Engine], rounds: int, expected: int
) -> dict[str, Any]:
    seconds, peaks = [], []
    for version in range(rounds + 1):
        before, began = forget_peak(), time.perf_counter()
        offered = await asyncio.to_thread(leader.weights, version)
        if way == "broadcast":
            shares = offered.shares(len(engines))
            await asyncio.gather(*(s.take(e.receiver()) for s, e in zip(shares, engines, strict=True)))
        elif way == "directory":
            await asyncio.gather(*(one.ask("load", str(offered)) for one in engines))
        else:
            for _ in offered:
                pass
        if version:  # the first one meets the engines and warms up
            seconds.append(time.perf_counter() - began)
            peaks.append(peak() - before)
        if way != "tensors":
            assert [await one.ask("checksum") for one in engines] == [expected] * len(engines), way
    return {"seconds": spread(seconds), "peak_bytes_of_rank_0": max(peaks)}


def checkpoint(leader: DistributedLearner, memory: Path, rounds: int) -> dict[str, Any]:
    seconds, peaks = [], []
    for number in range(rounds + 1):
        directory = memory / f"checkpoint-{number}"
        directory.mkdir()
        before, began = forget_peak(), time.perf_counter()
        leader.save(directory)
        if number:  # the first one makes the optimizer's moments
            seconds.append(time.perf_counter() - began)
            peaks.append(peak() - before)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        for path in directory.rglob("*.safetensors"):
            path.unlink()
    return {"seconds": spread(seconds), "bytes": size, "peak_bytes_of_rank_0": max(peaks)}


def measure(rounds: int, hidden: int) -> dict[str, Any]:
    """Run two ranks, and return what the first one found."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        command = [sys.executable, __file__, "--part", "rank", "--rounds", str(rounds), "--hidden", str(hidden)]
        common = {**os.environ, "WORLD_SIZE": "2", RENDEZVOUS: f"file://{place}/store"}
        ranks = [
            subprocess.Popen([*command, "--out", str(out)], env={**common, "RANK": str(number)}) for number in range(2)
        ]
        try:
            assert [process.wait(1200) for process in ranks] == [0, 0]
        finally:
            for process in ranks:
                process.kill()
        found: dict[str, Any] = json.loads(out.read_text())
        return {**found, "bucket_bytes": BUCKET_BYTES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "rank", "engine"), default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "engine":
        engine()
    elif options.part == "rank":
        rank(options.rounds, options.hidden, options.out)
    else:
        save(__file__, measure(options.rounds, options.hidden))


if __name__ == "__main__":
    main()
