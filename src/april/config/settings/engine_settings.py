"""Settings of the inference engine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    Gigabytes,
    NotNegative,
    Positive,
    Processes,
    ProcessesOrNone,
    Seconds,
    Share,
)
from april.rollout.engine import KVPolicy

API_KEY = "APRIL_ENGINE_API_KEY"
"""Environment variable with the key for servers that require one."""
PARALLEL = r"(?:--(?:tensor|pipeline|data)-parallel-size|--(?:tp|pp|dp)-size|--?(?:tp|pp|dp))[ =](\d+)"
"""Options of vLLM and SGLang for a server on several GPUs."""
SPECULATIVE = r"--spec(ulative)?[-_](config|method|model|tokens|algo|draft)|-sc$"
"""Options of vLLM and SGLang for speculative decoding."""


@dataclass(kw_only=True)
class EngineSettings:
    """The inference engine.

    Args:
        engine: april's own engine on the policy being trained (embedded), vLLM in the trainer's process (vllm-inproc),
            or inference servers (vllm, sglang).
        max_num_seqs: Samples that decode together: engine slots, of each server or rank. auto: 256 on GPUs, else 64.
        context_length: Maximum number of prompt and response tokens of a sample; unset: the model's limit.
        on_update: Treatment of unfinished samples at a weight update. recompute: keep the tokens and recompute the KV
            cache under the new weights. keep: keep tokens and KV cache. Recorded log-probabilities are exact in both.
            redraft (embedded): treat old tokens, also of complete groups that wait for training, as a draft that the
            new weights verify; accepted tokens are on-policy.
        kv_cache_gb: embedded: Maximum size of the KV cache on each rank, in GB, allocated on demand; samples wait while
            it is full. Unset: in the trainer's processes, the memory that training leaves free; elsewhere, 80 % of a
            GPU's free memory or 40 % of a CPU machine's.
        prefill_chunk: embedded: Maximum number of prefill tokens in one forward pass, of prompts and resumed samples.
            Smaller chunks delay decoding samples less; larger chunks need fewer passes.
        stream_interval: Decode steps between two polls; with servers, tokens of a sample per message (1 with on_update
            = keep). Finished samples are returned at once. auto: 8 steps; with servers, the number of tokens a sample
            gets in one second, which limits what a lost connection costs.
        own_process: embedded: Generate in a separate process on a copy of the policy; required by trainer.overlap.
        gpu_memory_utilization: vllm-inproc: Share of GPU memory that vLLM takes for weights and KV cache, also during
            training. Servers: use server_args.
        enforce_eager: vllm-inproc: Disable CUDA graphs, which need memory and start-up time. Servers: use server_args.
        urls: vllm, sglang: URLs of running servers. Unset: april starts servers and ends them with the run.
        replicas: vllm, sglang: Servers to start.
        gpus_per_replica: vllm, sglang: GPUs of each server that april starts, or of each engine on a cluster; the model
            is split over them. 0: CPU. auto: one GPU if the machine has any, or the number that parallelism options in
            server_args need. On one machine no two servers and no training process share a GPU.
        stream_readers: vllm, sglang: Processes that read the servers' streams. auto: none up to 1,024 samples in flight
            (the trainer's process reads them), otherwise one for each 4,096.
        server_python: vllm, sglang: Python interpreter of the environment with the server; unset: april's own.
        server_args: vllm, sglang: Further command-line options of servers that april starts.
        server_host: vllm, sglang: Address on which servers listen. Other machines can connect only to a non-loopback
            address; servers then require the key in the environment variable APRIL_ENGINE_API_KEY.
        weight_transfer: vllm, sglang: Transport of new weights: a directory that servers can read (disk), or a process
            group (broadcast: gloo on CPUs, nccl on GPUs). With trainer.layout = shared on GPUs, servers can read the
            trainer's memory (ipc: CUDA IPC). vllm with LoRA: adapters alone, by a directory; the server's
            workers merge them into the initial policy (adapters).
        broadcast_address: vllm, sglang: Address at which servers reach the trainer for broadcast. Unset: the loopback
            interface if all servers are local, otherwise this machine's address on the route to the first server.
        broadcast_interface: vllm, sglang: Network interface for broadcast on this machine, such as eth0; unset: chosen
            by gloo or nccl.
        ready_timeout: vllm, sglang: Time limit of a server's start, in seconds.
    """

    engine: Literal["embedded", "vllm", "sglang", "vllm-inproc"] = "embedded"
    max_num_seqs: Positive[int] | Literal["auto"] = "auto"
    context_length: Positive[int] | None = None
    on_update: KVPolicy = "recompute"
    kv_cache_gb: Gigabytes | None = None
    prefill_chunk: Positive[int] = 1024
    stream_interval: Positive[int] | Literal["auto"] = "auto"
    own_process: bool = False
    gpu_memory_utilization: Share = 0.3
    enforce_eager: bool = False
    urls: tuple[str, ...] = ()
    replicas: Processes = 1
    gpus_per_replica: NotNegative[int] | Literal["auto"] = "auto"
    stream_readers: ProcessesOrNone | Literal["auto"] = "auto"
    server_python: str | None = None
    server_args: tuple[str, ...] = ()
    server_host: str = "127.0.0.1"
    weight_transfer: Literal["disk", "broadcast", "ipc", "adapters"] = "disk"
    broadcast_address: str | None = None
    broadcast_interface: str | None = None
    ready_timeout: Seconds = 900.0

    @property
    def gpus_by_arguments(self) -> int | None:
        """Number of GPUs that the parallelism options in `server_args` need; None without such options."""
        named = re.findall(PARALLEL, " ".join(self.server_args))
        return math.prod(map(int, named)) if named else None

    @property
    def speculative_option(self) -> str | None:
        """First option in `server_args` that turns on speculative decoding; None without one."""
        options = (argument.partition("=")[0] for argument in self.server_args)
        return next((option for option in options if re.match(SPECULATIVE, option)), None)

    @property
    def steps_per_poll(self) -> int:
        """Decode steps between two polls of an engine that is no server, with `auto` resolved."""
        return 8 if self.stream_interval == "auto" else self.stream_interval

    @property
    def kv_cache_bytes(self) -> int | None:
        """Maximum size of the KV cache in bytes; None if unset."""
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 1e9)
