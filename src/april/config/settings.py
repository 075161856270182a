"""The sections of a recipe: every setting of a run, its type, its range and its default.

Invariant: the type of a setting holds its range (`ranges`) and the docstring of its section holds its meaning. Both
have no other definition.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from april.config.ranges import (
    Gigabytes,
    NotNegative,
    Positive,
    Processes,
    ProcessesOrNone,
    Seconds,
    SecondsOrZero,
    Share,
)
from april.rollout.engine import KVPolicy
from april.rollout.params import MAX_STALENESS

API_KEY = "APRIL_ENGINE_API_KEY"
"""Environment variable with the key for servers that require one."""
PARALLEL = r"(?:--(?:tensor|pipeline|data)-parallel-size|--(?:tp|pp|dp)-size|--?(?:tp|pp|dp))[ =](\d+)"
"""Options of vLLM and SGLang for a server on several GPUs."""
SPECULATIVE = r"--spec(ulative)?[-_](config|method|model|tokens|algo|draft)|-sc$"
"""Options of vLLM and SGLang for speculative decoding."""


@dataclass(kw_only=True)
class ModelSettings:
    """The policy.

    Args:
        path: Hugging Face causal language model: a directory or a hub name.
        dtype: Type of the trained parameters, the gradient sums and the optimizer state. bfloat16 rounds away updates
            at usual learning rates and is refused there.
        compute_dtype: Type of the trainer's forward and backward passes and of generation. With float32 parameters,
            bfloat16 computes on a rounded copy. auto: bfloat16 on GPUs, otherwise the type in dtype.
        device: Device for training and, with the embedded engine, generation: auto, cpu, cuda, cuda:1, …
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"

    @property
    def on_gpu(self) -> bool:
        """Whether the policy is trained on a GPU; `auto` uses one if PyTorch finds any."""
        if self.device != "auto":
            return self.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()


@dataclass(kw_only=True)
class RolloutSettings:
    """How responses are generated.

    Args:
        partial_rollout: Active partial rollouts: start more groups than a step needs, interrupt the rest once enough
            are complete, and resume those first in the next step. Off: synchronous generation, every sample on-policy.
        policy: april, or the reference implementation's policy for comparisons (april-paper): fixed N', no staleness
            bound, batches of the groups that complete first.
        rollout_batch_size: Groups in a training step (N).
        over_sampling_batch_size: Groups in flight at the start of a step (N'), from N to N × (max_staleness + 1). auto:
            the smallest number whose forecast throughput is within 2 % of the best that the staleness bound allows,
            recomputed as lengths and speeds change.
        n_samples_per_prompt: Samples in a group (G).
        max_staleness: Staleness bound: the maximum number of weight updates between a group's first token and the step
            that trains on it.
        ramp_steps: Steps over which N' grows from N to its value. The first step is then synchronous, so that the
            policy is not first trained on short responses alone. 0: no ramp.
        admission_window: Hold back a complete group while more than this many groups started after the oldest
            unfinished group and before it, so that short responses are not trained on before long ones. Unset: no group
            is held back.
        max_prompt_length: Leave out prompts with more tokens than this. Unset: the context length minus
            max_response_length.
        max_response_length: Response budget of a sample, in tokens.
        temperature: Sampling temperature.
        top_p: Nucleus sampling; 1 turns it off. Under truncated sampling the trainer renormalises its distribution over
            the same set of tokens.
        top_k: Sample from the k most probable tokens; 0 turns it off.
        min_p: Sample from tokens whose probability is at least this share of the largest; 0 turns it off.
        stop_token_ids: Tokens that end a response, in addition to the model's end-of-sequence tokens.
        dynamic_sampling: Replace groups whose rewards are all equal, one for one. Unset: the algorithm's published
            choice.
        max_rejected_groups: Maximum number of groups that dynamic sampling rejects in one step before the run stops;
            unset: 20 N.
        outage_limit: Maximum duration in seconds of an engine outage (no request succeeds). No sample is given up
            during an outage; after this time the run stops and can be resumed.
        on_reward_error: Action when a reward function fails: stop the run (raise), score the sample 0 (zero), or leave
            out its group (reject).
        reward_timeout: Time limit of one reward, in seconds.
        reward_workers: Maximum number of processes that compute rewards during generation. One starts with the run,
            further ones start while rewards wait. Unset: slightly more than the number of CPU cores. 0: threads of the
            run's own process, for fast functions that cannot hang, because a hung thread cannot be stopped.
        reward_memory_gb: Memory limit of a reward process in GB, in addition to its memory after loading (Linux only);
            unset: no limit.
        reward_env: Environment variables that reward processes get although their names look like secrets. All other
            such variables are removed.
    """

    partial_rollout: bool = True
    policy: Literal["april", "april-paper"] = "april"
    rollout_batch_size: Positive[int] = 32
    over_sampling_batch_size: Positive[int] | Literal["auto"] = "auto"
    n_samples_per_prompt: Positive[int] = 8
    max_staleness: NotNegative[int] = MAX_STALENESS
    ramp_steps: NotNegative[int] = 0
    admission_window: Positive[int] | None = None
    max_prompt_length: Positive[int] | None = None
    max_response_length: Positive[int] = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[NotNegative[int], ...] = ()
    dynamic_sampling: bool | None = None
    max_rejected_groups: Positive[int] | None = None
    outage_limit: Seconds = 600.0
    on_reward_error: Literal["raise", "zero", "reject"] = "raise"
    reward_timeout: Seconds | None = 30.0
    reward_workers: ProcessesOrNone | None = None
    reward_memory_gb: Gigabytes | None = 4.0
    reward_env: tuple[str, ...] = ()


@dataclass(kw_only=True)
class EnvironmentSettings:
    """The environment of multi-turn episodes. Without path and tools, a response is a single turn.

    Args:
        path: Environment class or factory: FILE.py:NAME or package.module:NAME.
        tools: Python functions offered as tools, in place of an environment: FILE.py:NAME,NAME,…
        params: Keyword arguments of the environment's constructor.
        max_turns: Maximum number of turns in an episode. max_response_length limits the policy's tokens over all turns;
            context_length limits all tokens.
        reward: Reward of an episode: the sum of the environment's rewards (environment), the task's reward for the
            whole response (task), or the sum of both (sum).
        recovery: Recovery of an environment after a crash or failure: repeat the recorded turns and require identical
            observations (replay), restore the last state() (snapshot), call reset alone (stateless), or restart the
            episode (restart).
        on_env_error: Action when a step fails: report the error to the policy as an observation and continue (observe),
            end the episode with its rewards so far (end), or leave out its group (reject).
        concurrency: Maximum number of environments that execute at the same time.
        workers: Maximum number of worker processes for environments. 0: the run's own process, for fast environments
            that cannot hang. Unset: the number of CPU cores, at most 8.
        reset_timeout: Time limit of a reset in seconds, including the start of a worker process.
        step_timeout: Time limit of a step, in seconds.
        episode_deadline: Time limit of the environment over all turns of an episode, in seconds; unset: no limit.
        max_retries: Replacement environments per turn whose environment was lost, and per failed reset.
        max_restarts: Restarts of an episode before its group is left out.
        env: Environment variables that workers get although their names look like secrets.
    """

    path: str = ""
    tools: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    max_turns: Positive[int] = 8
    reward: Literal["environment", "task", "sum"] = "environment"
    recovery: Literal["replay", "snapshot", "stateless", "restart"] = "replay"
    on_env_error: Literal["observe", "end", "reject"] = "observe"
    concurrency: Positive[int] = 64
    workers: ProcessesOrNone | None = None
    reset_timeout: Seconds | None = 120.0
    step_timeout: Seconds | None = 60.0
    episode_deadline: Seconds | None = None
    max_retries: NotNegative[int] = 3
    max_restarts: NotNegative[int] = 3
    env: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        return bool(self.path or self.tools)


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
            group (broadcast: gloo on CPUs, nccl on GPUs). vllm with LoRA: adapters alone, by a directory; the server's
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
    weight_transfer: Literal["disk", "broadcast", "adapters"] = "disk"
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
    def kv_cache_bytes(self) -> int | None:
        """Maximum size of the KV cache in bytes; None if unset."""
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 1e9)


@dataclass(kw_only=True)
class ClusterSettings:
    """Engines on nodes of a running Ray cluster (docs/distributed.md; needs the extra `cluster`).

    Nodes may die, hang, leave and join during the run. april cluster check RECIPE lists the engines and ranks that fit
    onto each node.

    Args:
        address: Address of the cluster: HOST:PORT of its head, or auto: the cluster in RAY_ADDRESS, as in a Ray job,
            otherwise the cluster that this machine belongs to. Unset: no cluster; the engine runs on this machine.
        replicas: Engines, each with a copy of the policy. auto: all that fit, including nodes that join later.
        cpus_per_replica: CPUs of an engine, all on one node; without GPUs also its number of threads.
        placement: Nodes that get engines: all, as evenly as there is room (spread); all but those that train
            (exclude_trainer); only those that train (trainer_only).
        rewards: Location of worker processes for rewards: the trainer's machine, or all nodes with
            rollout.reward_workers processes each. Their CPUs are not reserved.
        ranks: Location of the training ranks (trainer.processes): the machine of april train (driver), or, for all
            ranks but the first, nodes with room (nodes), each with a GPU if the cluster has any, unless model.device is
            cpu.
        cpus_per_rank: CPUs of a rank on a node.
        environments: Location of environments: worker processes on the trainer's machine, or all nodes with
            environment.workers processes each. Their CPUs are not reserved.
    """

    address: str = ""
    replicas: Positive[int] | Literal["auto"] = "auto"
    cpus_per_replica: Positive[int] = 1
    placement: Literal["spread", "exclude_trainer", "trainer_only"] = "spread"
    rewards: Literal["trainer", "nodes"] = "trainer"
    ranks: Literal["driver", "nodes"] = "driver"
    cpus_per_rank: Positive[int] = 1
    environments: Literal["trainer", "nodes"] = "trainer"

    @property
    def enabled(self) -> bool:
        return bool(self.address)


@dataclass(kw_only=True)
class LoraSettings:
    """Low-rank adapters in place of training all parameters (needs the extra `lora`).

    Args:
        rank: Rank of the adapters; 0 trains all parameters.
        alpha: Scale: the adapters' output is multiplied by alpha / rank; unset: twice the rank.
        target_modules: Names of the modules that get adapters; unset: every linear layer but the head.
    """

    rank: NotNegative[int] = 0
    alpha: Positive[int] | None = None
    target_modules: tuple[str, ...] = ()

    @property
    def scale_alpha(self) -> int:
        """Alpha, with the default resolved."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(kw_only=True)
class TrainingSettings:
    """Optimisation, evaluation and checkpoints.

    Args:
        steps: Training steps.
        updates_per_step: Optimizer updates per step; the batch is divided by whole groups.
        learning_rate: Peak learning rate of AdamW.
        critic_learning_rate: ppo: Peak learning rate of the critic.
        lr_schedule: Decay of the learning rates from the peak to zero at the last step.
        warmup_steps: Steps of linear warm-up.
        betas: AdamW's decay rates.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradient norm to which larger gradients are clipped.
        max_tokens_per_micro_batch: Tokens in one forward and backward pass, including padding for architectures that
            need it. Halved automatically when memory runs out.
        max_skipped_updates: Maximum number of consecutive updates skipped because the loss or gradient is not finite;
            then the run stops. Their batches are saved in the directory `skipped` of the run.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Seed of data order, sampling and initialisation.
        threads: CPU threads of PyTorch; unset: PyTorch's default.
        eval_interval: Steps between evaluations on held-out problems; 0: only before and after training.
        eval_samples: Samples per held-out problem; accuracy is the mean over them.
        eval_temperature: Sampling temperature of evaluations; unset: temperature.
        save_interval: Steps between checkpoints; 0: only at the end.
        keep_checkpoints: Number of newest checkpoints kept on disk.
        journal_flush_seconds: Longest time in seconds before the journal writes an event to disk: a crash loses at most
            this many seconds of rollouts. 0 writes every token before generation continues.
    """

    steps: Positive[int] = 100
    updates_per_step: Positive[int] = 1
    learning_rate: Positive[float] = 1e-6
    critic_learning_rate: Positive[float] = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NotNegative[int] = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NotNegative[float] = 0.0
    max_grad_norm: Positive[float] = 1.0
    max_tokens_per_micro_batch: Positive[int] = 8192
    max_skipped_updates: Positive[int] = 3
    gradient_checkpointing: bool = False
    seed: NotNegative[int] = 0
    threads: Positive[int] | None = None
    eval_interval: NotNegative[int] = 10
    eval_samples: Positive[int] = 4
    eval_temperature: NotNegative[float] | None = None
    save_interval: NotNegative[int] = 50
    keep_checkpoints: Positive[int] = 2
    journal_flush_seconds: SecondsOrZero = 1.0


@dataclass(kw_only=True)
class TrainerSettings:
    """Training processes and their parallelism.

    Args:
        backend: local: one process on one device. fsdp2: ranks that each hold a shard of parameters, gradients and
            optimizer state (PyTorch FSDP2). megatron: ranks that compute the policy with Megatron-Core, which the
            environment must have. auto: local with one process, fsdp2 with more.
        processes: Training processes (ranks), which april starts on this machine, or on nodes of a cluster
            (cluster.ranks); with GPUs, one GPU each.
        overlap: Overlap generation with training: generation stops only for the weight update, and max_staleness still
            holds. Needs engines on devices of their own: servers, or engine.own_process. Off: generation and training
            alternate. auto: on where possible.
        layout: Devices of engine and trainer. split: each has its own, except engines in the trainer's process. shared:
            both use the same GPUs in turn; the engine releases its memory while the trainer trains, and the trainer
            moves its state to host memory while the engine generates.
        policy_replicas: fsdp2: Copies of the sharded policy (HSDP): each copy is sharded over processes /
            policy_replicas ranks, and only gradients are reduced between copies.
        context_parallel: fsdp2: Ranks that share each sequence in training, for long responses: each computes a part of
            the tokens. Must divide processes, attention heads and key-value heads.
        tensor_parallel: fsdp2, megatron: Ranks that share the matrices of each layer, split by heads and columns. fsdp2
            uses transformers' plan for the architecture and shards each part over the remaining ranks. Its product with
            context_parallel must divide processes, attention heads and key-value heads.
        expert_parallel: fsdp2: Ranks that share the experts of a mixture of experts by whole experts and exchange
            tokens. Must be a multiple of tensor_parallel and divide the number of experts and the ranks of each policy
            copy.
        cpu_offload: fsdp2: Keep parameters, gradients and optimizer state in host memory and update them there; a layer
            is on the GPU while it computes.
        rank_timeout: Time limit in seconds for a collective operation and for the heartbeat of a rank. After it all
            ranks are restarted from the newest checkpoint and the journal.
        max_restarts: Restarts of the ranks without a completed training step between them, before the run ends.
    """

    backend: Literal["auto", "local", "fsdp2", "megatron"] = "auto"
    processes: Processes = 1
    overlap: bool | Literal["auto"] = False
    layout: Literal["split", "shared"] = "split"
    policy_replicas: Positive[int] = 1
    context_parallel: Positive[int] = 1
    tensor_parallel: Positive[int] = 1
    expert_parallel: Positive[int] = 1
    cpu_offload: bool = False
    rank_timeout: Seconds = 300.0
    max_restarts: NotNegative[int] = 3

    @property
    def backend_name(self) -> str:
        """Backend, with `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "fsdp2" if self.processes > 1 else "local"

    @property
    def sharded(self) -> bool:
        """Whether the backend trains with ranks, even if there is only one."""
        return self.backend_name in ("fsdp2", "megatron")


@dataclass(kw_only=True)
class ReportingSettings:
    """Output directory, console and trackers.

    Args:
        output: Directory of the run: metrics, checkpoints, report.
        if_exists: Action if the directory has a run already: stop with an error, or rename the old run (DIR.1, DIR.2,
            …).
        trackers: Trackers that get the metrics, in addition to metrics.jsonl.
        prometheus_address: HOST:PORT of the metrics endpoint with the tracker prometheus. An address that other
            machines reach is readable by all of them.
        project: Project name in wandb and trackio, experiment in MLflow.
        show_completions: Number of completions per step and evaluation to print on the console.
    """

    output: str = "runs/april"
    if_exists: Literal["error", "rename"] = "error"
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus"], ...] = ("tensorboard",)
    prometheus_address: str = "127.0.0.1:9464"
    project: str = "april"
    show_completions: NotNegative[int] = 0
