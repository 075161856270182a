"""What the parts of `benchmarks/node.py` are given, and servers for them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts.bench import Bench, prompts

from april.engines import gpus
from april.engines.devices import DeviceMap, assign
from april.engines.gpus import Gpu
from april.engines.servers.launch import Launch, Server, launch_sglang, launch_vllm
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import Engine
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample

READY_SECONDS = 150.0


@dataclass(frozen=True)
class Kind:
    """How a kind of server is started, put to sleep and woken: paths with their bodies."""

    start: Callable[..., AbstractAsyncContextManager[Server]]
    connect: Callable[..., Any]
    dtype: str
    length: str
    memory: str
    sleeps: str
    sleep: tuple[str, Any]
    wake_weights: tuple[str, Any]
    wake_cache: tuple[str, Any]


KINDS = {
    "vllm": Kind(
        launch_vllm,
        connect_vllm,
        "--dtype",
        "--max-model-len",
        "--gpu-memory-utilization",
        "--enable-sleep-mode",
        ("/sleep?level=2&mode=abort", None),
        ("/wake_up?tags=weights", None),
        ("/wake_up?tags=kv_cache", None),
    ),
    "sglang": Kind(
        launch_sglang,
        connect_sglang,
        "--dtype",
        "--context-length",
        "--mem-fraction-static",
        "--enable-memory-saver",
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ),
}


@dataclass(frozen=True)
class Given:
    """Options of the command.

    Args:
        engine: kind of the servers.
        server_python: interpreter of their environment.
        server_arguments: more of their options.
        commands: the user's own, by the name of the part.
        metric: regular expression with one group, which finds a number in a line of their output.
        run_seconds: after which a command of the user's is ended.
        slower: factor of all limits.
    """

    device: str
    tiny: bool
    engine: str
    server_python: str
    server_arguments: str
    commands: dict[str, str]
    metric: str
    run_seconds: float
    slower: float = 1.0

    @property
    def bench(self) -> Bench:
        return Bench(self.device, self.tiny)

    @property
    def kind(self) -> Kind:
        return KINDS[self.engine]

    def gpus(self) -> list[Gpu]:
        return gpus.visible() if self.device != "cpu" else []

    def map(self, servers: int) -> DeviceMap | None:
        """The GPUs of the trainer and of the given number of servers; None on the CPU."""
        return assign(self.gpus(), [0], servers, 1) if self.device != "cpu" else None

    def server(
        self,
        model: Path,
        folder: Path,
        number: int,
        more: Sequence[str] = (),
        devices: DeviceMap | None = None,
        **how: Any,
    ) -> AbstractAsyncContextManager[Server]:
        """A server of `model`, on GPUs of its own."""
        kind = self.kind
        arguments = [kind.dtype, str(self.bench.dtype).removeprefix("torch."), kind.length, "512", *more]
        arguments += [kind.memory, "0.5"] if self.device != "cpu" else []
        settings = Launch(
            log_dir=folder,
            name=f"{self.engine}-{number}",
            python=self.server_python,
            arguments=[*arguments, *shlex.split(self.server_arguments)],
            environment={"HF_HUB_OFFLINE": "1", **(devices.environment(number) if devices else {})},
            ready_timeout=READY_SECONDS * self.slower,
        )
        return kind.start(model, settings, **how)


def samples(given: Given, count: int = 8) -> list[Sample]:
    bench = given.bench
    sampling = SamplingParams(max_tokens=bench.size(64, 8))
    return [Sample(i, 0, p.token_ids, sampling, i) for i, p in enumerate(prompts(count, 32, bench.shape.vocabulary))]


async def finish(engine: Engine, given: Sequence[Sample]) -> None:
    """Generate samples to their ends."""
    by_id = {sample.id: sample for sample in given}
    for sample in given:
        engine.submit(sample)
    while any(sample.finish is None for sample in given):
        for chunk in await engine.poll():
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
