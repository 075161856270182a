"""The sections of a recipe: every setting of a run, its type, its range and its default.

Invariant: a setting's range is in its type (`ranges`), and what it means in its section's docstring; both are said
nowhere else.
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
"""The environment variable that holds the key of servers that want one."""
PARALLEL = r"(?:--(?:tensor|pipeline|data)-parallel-size|--(?:tp|pp|dp)-size|--?(?:tp|pp|dp))[ =](\d+)"
"""Options of vLLM and SGLang that have a server take several GPUs."""
SPECULATIVE = r"--spec(ulative)?[-_](config|method|model|tokens|algo|draft)|-sc$"
"""Options of vLLM and SGLang that have them speculate."""


@dataclass(kw_only=True)
class ModelSettings:
    """The policy.

    Args:
        path: Policy: a Hugging Face causal LM, as a directory or a hub name.
        dtype: Type of the parameters that are trained, of the sums of their gradients and of the optimizer's state.
            bfloat16 rounds away the updates of usual learning rates, and is refused there.
        compute_dtype: Type that forward and backward passes compute in, and that engines generate in. With float32
            parameters, bfloat16 is a rounded copy of them. auto: bfloat16 on GPUs, else as dtype.
        device: Where to train and, with the embedded engine, to generate: auto, cpu, cuda, cuda:1, …
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"

    @property
    def on_gpu(self) -> bool:
        """Whether the policy is trained on a GPU; `auto` asks PyTorch."""
        if self.device != "auto":
            return self.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()


@dataclass(kw_only=True)
class RolloutSettings:
    """How responses are generated.

    Args:
        partial_rollout: Active partial rollouts: start more groups than a step needs, interrupt the rest once
            enough are complete, and go on with them first in the next step. Off: synchronous, every sample
            on-policy.
        policy: april, or the reference's for comparison (april-paper): a fixed N', no staleness bound, the groups that
            are complete first, in the order of their arrival.
        rollout_batch_size: Groups a step trains on (N).
        over_sampling_batch_size: Groups under way at a step's start (N'), from N to N × (max_staleness + 1). auto:
            the fewest that are expected to come within 2 % of the best throughput that the bound allows, chosen
            anew as lengths and speeds drift.
        n_samples_per_prompt: Samples in a group (G).
        max_staleness: The most weight updates between a group's first token and the step that trains on it. A
            guarantee.
        ramp_steps: Steps over which N' grows from N to its value: the first is synchronous, so that it is not trained
            on quick answers alone. 0: no ramp.
        admission_window: A complete group waits until it is fewer admissions than this after the oldest unfinished one,
            so that quick answers are not trained on before slow ones. Unset: it never waits.
        order: Which unfinished samples get a slot first.
        max_prompt_length: Leave out prompts of more tokens than this; unset: what the context has room for
            beside a full response.
        max_response_length: Response budget of a sample, in tokens.
        temperature: Sampling temperature.
        top_p: Nucleus sampling; 1 is off. Under truncated sampling the trainer scores tokens under what the same rule
            leaves of its own distribution (docs/algorithms.md).
        top_k: Sample among the k most probable tokens; 0 is off.
        min_p: Sample among tokens at least this times as probable as the best one; 0 is off.
        stop_token_ids: Tokens that end a response, beside the model's end-of-sequence tokens.
        dynamic_sampling: Replace groups whose rewards are all equal, one for one. Unset: as the algorithm
            publishes it.
        max_rejected_groups: Groups of one step that dynamic sampling may turn away before the run stops; 20 N
            if unset.
        outage_limit: Seconds that the engine may answer no request at all. Until then nothing is given up; then the run
            stops, and can be resumed.
        on_reward_error: When a reward function fails: stop the run, score the sample 0, or leave its group out.
        reward_timeout: Seconds a reward may take.
        reward_workers: Processes that compute rewards beside generation, at most. One is there from the start, more
            come as long as rewards wait. Unset: a few more than there are cores. 0 computes them in threads of the
            run's own process, which suits quick functions that cannot hang: nothing can stop one that does.
        reward_memory_gb: Memory a reward process may take beyond what it holds after loading, in GB (on Linux);
            unset: no limit.
        reward_env: Environment variables that reward processes get although their names look like secrets; all
            other such variables are kept from them.
    """

    partial_rollout: bool = True
    policy: Literal["april", "april-paper"] = "april"
    rollout_batch_size: Positive[int] = 32
    over_sampling_batch_size: Positive[int] | Literal["auto"] = "auto"
    n_samples_per_prompt: Positive[int] = 8
    max_staleness: NotNegative[int] = MAX_STALENESS
    ramp_steps: NotNegative[int] = 0
    admission_window: Positive[int] | None = None
    order: Literal["oldest", "most-complete", "nearest", "longest", "shortest"] = "oldest"
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
    """What answers the policy's turns, in episodes; without path and tools a response is one turn, and nothing does.

    Args:
        path: The environment: FILE.py:NAME or package.module:NAME.
        tools: Instead of it, Python functions that are tools: FILE.py:NAME,NAME,…
        params: What the environment is made with.
        max_turns: Turns of an episode. The response budget (max_response_length) counts the policy's tokens of all of
            them, the context everything.
        reward: What an episode is rewarded with: the sum of what its environment gave (environment), the task's own
            reward for the whole response (task), or both (sum).
        recovery: How an environment is brought back, after a crash or a failure: by the same turns again, which must be
            answered alike (replay), by what its state() said last (snapshot), by a reset alone (stateless), or not at
            all: the episode begins again (restart).
        on_env_error: When a step fails: tell the policy, and go on as if the turn had not been taken (observe); end the
            episode with its rewards so far (end); leave its group out (reject).
        concurrency: Environments that work at a time.
        workers: Processes in which they live, at most. 0: in the run's own process, which suits quick environments that
            cannot hang. Unset: as many as there are cores, at most 8.
        reset_timeout: Seconds a reset may take, the start of a process included.
        step_timeout: Seconds a step may take.
        episode_deadline: Seconds that the environment of an episode may take over all its turns; unset: no limit.
        max_retries: New environments that are tried for a turn whose environment was lost, and for a failed reset.
        max_restarts: Times that an episode may begin again, before its group is left out.
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
    """What generates them.

    Args:
        engine: april's own engine on the policy being trained (embedded), vLLM in this process (vllm-inproc), or
            servers (vllm, sglang).
        max_num_seqs: Samples that decode together: engine slots, of each server or rank. auto: 256 on GPUs, else 64.
        context_length: Prompt and response tokens of a sample together; unset: what the model allows.
        on_update: What becomes of an unfinished sample when the weights change. Its KV cache is computed anew under the
            new weights (recompute), or kept (keep), and its tokens stay; the recorded log-probabilities are exact in
            both. redraft (embedded): its tokens, and those of groups that wait to be trained on, are drafts, of which
            the new weights keep what they would have drawn themselves, so that nothing is stale.
        kv_cache_gb: embedded: most memory for the KV cache, in GB, on each rank, allocated as samples need it; samples
            wait when it is full. Unset: in the trainer's processes the memory that the trainer leaves; elsewhere 80 %
            of the free memory of a GPU, and 40 % of that of a CPU machine.
        prefill_chunk: embedded: Tokens of prompts and resumed samples in one forward pass. Fewer delay the samples that
            decode by less, more make fewer passes.
        stream_interval: Decode steps between two looks at what was sampled; of servers, tokens of a sample that are
            sent together (one by one with on_update = keep). Finished samples show at once. auto: 8 steps; of servers,
            as many tokens as a sample gets in a second, which is what a lost connection may cost it.
        own_process: embedded: generate in a process of its own, on a copy of the policy; what trainer.overlap needs.
        gpu_memory_utilization: vllm-inproc: Share of the GPU's memory that vLLM takes for weights and KV cache at the
            start, and keeps while the trainer trains on the rest. Servers: server_args.
        enforce_eager: vllm-inproc: Without CUDA graphs, which take memory and time at the start. Servers: server_args.
        urls: vllm, sglang: running servers; unset: april starts them and ends them with the run.
        replicas: vllm, sglang: servers to start.
        gpus_per_replica: vllm, sglang: GPUs of each server that april starts, or of each engine on a cluster, across
            which the model is split. 0: on the CPU. auto: one if there are any, or as many as server_args name. On one
            machine servers get GPUs that no other server and no training process has.
        stream_readers: vllm, sglang: processes that read what servers stream, in the trainer's place. auto: none up
            to 1,024 samples in flight, which the trainer reads itself, else one for each 4,096.
        server_python: vllm, sglang: the interpreter of the environment the server is installed in; unset: april's.
        server_args: vllm, sglang: more options of the servers that april starts.
        server_host: vllm, sglang: the address on which they listen. Other machines reach them only if it is none of
            this machine's own; then they ask for the key in the environment variable APRIL_ENGINE_API_KEY.
        weight_transfer: vllm, sglang: new weights by a directory the servers can read (disk), or over a process group
            (broadcast: gloo on CPUs, nccl on GPUs). vllm with LoRA: the adapters alone, by such a directory, which its
            workers merge into the policy that the adapters were begun with (adapters).
        broadcast_address: vllm, sglang: where servers reach the trainer for it; unset: the loopback interface if all of
            them are there, else this machine's address towards the first one.
        broadcast_interface: vllm, sglang: the network interface that weights take on this machine, like eth0; unset:
            as gloo and nccl choose.
        ready_timeout: vllm, sglang: seconds a server may take to start.
    """

    engine: Literal["embedded", "vllm", "sglang", "vllm-inproc"] = "embedded"
    max_num_seqs: Positive[int] | Literal["auto"] = "auto"
    context_length: Positive[int] | None = None
    on_update: Literal["recompute", "keep", "redraft"] = "recompute"
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
        """GPUs of a server by its own options of parallelism; None if they name none."""
        named = re.findall(PARALLEL, " ".join(self.server_args))
        return math.prod(map(int, named)) if named else None

    @property
    def speculative_option(self) -> str | None:
        """The first of its own options that has a server speculate; None if none does."""
        options = (argument.partition("=")[0] for argument in self.server_args)
        return next((option for option in options if re.match(SPECULATIVE, option)), None)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Memory for the KV cache; None if it is not set."""
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 1e9)

    @property
    def kv_policy(self) -> KVPolicy:
        """What the engine does with KV caches of unfinished samples."""
        return "keep" if self.on_update == "keep" else "recompute"


@dataclass(kw_only=True)
class ClusterSettings:
    """Engines on the nodes of a Ray cluster that is running (docs/cluster.md; needs the extra `cluster`).

    Nodes may die, hang, leave and join while the run goes on. april cluster check RECIPE says what fits where.

    Args:
        address: The cluster: its head as HOST:PORT, or auto: the one that RAY_ADDRESS names, as in a Ray job, else the
            one that this machine is a node of. Unset: no cluster, and the engine works in this process or on this
            machine.
        replicas: Engines, each with a copy of the policy. auto: as many as there is room for, also on nodes that join.
        cpus_per_replica: CPUs of an engine, all on one node; without GPUs it computes with as many threads.
        placement: Nodes that get engines: all, as evenly as there is room (spread); all but those that train (apart);
            those alone (beside).
        rewards: Where worker processes compute rewards: on the trainer's machine, or on all nodes, as many on each as
            rollout.reward_workers says. Their CPUs are not reserved.
        ranks: Where the ranks of trainer.processes work: on the machine of april train (driver), or all but the first
            on nodes with room (nodes), each with a GPU if the cluster has any, unless model.device is cpu.
        cpus_per_rank: CPUs of a rank on a node.
        environments: Where environments live: in worker processes on the trainer's machine, or on all nodes, as many on
            each as environment.workers says. Their CPUs are not reserved.
    """

    address: str = ""
    replicas: Positive[int] | Literal["auto"] = "auto"
    cpus_per_replica: Positive[int] = 1
    placement: Literal["spread", "apart", "beside"] = "spread"
    rewards: Literal["trainer", "nodes"] = "trainer"
    ranks: Literal["driver", "nodes"] = "driver"
    cpus_per_rank: Positive[int] = 1
    environments: Literal["trainer", "nodes"] = "trainer"

    @property
    def enabled(self) -> bool:
        return bool(self.address)


@dataclass(kw_only=True)
class LoraSettings:
    """Low-rank adapters instead of all parameters (needs the extra `lora`).

    Args:
        rank: Rank of the adapters; 0 trains all parameters.
        alpha: The adapters' output counts alpha / rank; unset: twice the rank.
        target_modules: Names of the modules that get adapters; unset: every linear layer but the head.
    """

    rank: NotNegative[int] = 0
    alpha: Positive[int] | None = None
    target_modules: tuple[str, ...] = ()

    @property
    def scale_alpha(self) -> int:
        """Alpha with its default filled in."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(kw_only=True)
class TrainingSettings:
    """How it is optimised.

    Args:
        steps: Training steps: rollout batches to collect and train on.
        updates_per_step: Optimizer updates a rollout batch is divided into, by whole groups.
        learning_rate: Peak learning rate of AdamW.
        critic_learning_rate: ppo: that of the critic.
        lr_schedule: How the learning rates go from their peaks to zero at the last step.
        warmup_steps: Steps of linear warm-up.
        betas: AdamW's decay rates.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradients are clipped to this norm.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass, padding included where the model's
            architecture needs any. Lower it when memory runs out; it is halved then by itself.
        max_skipped_updates: Updates in a row that may be skipped because loss or gradient is not finite; then the
            run stops. Their batches are kept in the run's folder `skipped`.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Everything random follows from it: data order, samples, initialisation.
        threads: CPU threads of PyTorch; unset: as PyTorch chooses.
        eval_interval: Steps between evaluations on held-out problems; 0 evaluates before and after training
            only.
        eval_samples: Samples per held-out problem; accuracy is their mean.
        eval_temperature: Temperature of evaluation; unset: the rollouts'.
        save_interval: Steps between checkpoints; 0 saves at the end only.
        keep_checkpoints: Checkpoints kept on disk, the newest ones.
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
    """Which processes train it, and when (docs/training.md).

    Args:
        backend: local: one process on one device. fsdp2: processes that each hold a shard of parameters, gradients and
            optimizer state (PyTorch FSDP2). megatron: processes that compute the policy by Megatron-Core, in an
            environment that has it. auto: local with one process, fsdp2 with more.
        processes: Processes that train together, ranks, which april starts on this machine, or on nodes of a cluster
            (cluster.ranks); on GPUs one each.
        overlap: Generation goes on while a step is trained on, and stops for the weight update alone; max_staleness
            holds all the same. For engines with devices of their own: servers, or engine.own_process. Off: they take
            turns. auto: on wherever it is possible.
        policy_replicas: fsdp2: Copies of the sharded policy (HSDP): each is spread over as many ranks, and only
            gradients go from copy to copy.
        context_parallel: fsdp2: Ranks that share each response in training, for long ones: each runs the layers over
            its part of the tokens. Divides processes, and the policy's attention heads and key-value heads.
        tensor_parallel: fsdp2, megatron: Ranks that divide the matrices of each layer among themselves, heads and
            columns; with fsdp2 by transformers' plan for the architecture, and FSDP2 shards each part over the others.
            Times context_parallel it divides processes, the attention heads and the key-value heads.
        expert_parallel: fsdp2: Ranks that divide the experts of a mixture of experts, whole ones, and send tokens to
            them. A multiple of tensor_parallel; divides the experts, and the processes of each copy of the policy.
        cpu_offload: fsdp2: Keep parameters, gradients and optimizer in the machine's memory, and update them there; a
            layer is on the GPU while it computes.
        rank_timeout: Seconds that ranks wait for one another, and for a sign of life of each; then all are ended and
            started anew, and go on from the newest checkpoint and the journal.
        max_restarts: Such restarts without a training step done in between, after which the run ends.
    """

    backend: Literal["auto", "local", "fsdp2", "megatron"] = "auto"
    processes: Processes = 1
    overlap: bool | Literal["auto"] = False
    policy_replicas: Positive[int] = 1
    context_parallel: Positive[int] = 1
    tensor_parallel: Positive[int] = 1
    expert_parallel: Positive[int] = 1
    cpu_offload: bool = False
    rank_timeout: Seconds = 300.0
    max_restarts: NotNegative[int] = 3

    @property
    def backend_name(self) -> str:
        """The backend, with `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "fsdp2" if self.processes > 1 else "local"

    @property
    def sharded(self) -> bool:
        """Whether ranks train, be it one."""
        return self.backend_name in ("fsdp2", "megatron")


@dataclass(kw_only=True)
class ReportingSettings:
    """What is written, and where.

    Args:
        output: The run's directory: metrics, checkpoints, report.
        if_exists: When a run is there already: stop, or keep it under another name (DIR.1, DIR.2, …).
        trackers: Where metrics go beside metrics.jsonl.
        prometheus_address: HOST:PORT on which prometheus, one of the trackers, is served; on an address that other
            machines reach, everybody there reads it.
        project: Project name for wandb and trackio, experiment for MLflow.
        show_completions: Completions of each step and evaluation that are shown on the console.
    """

    output: str = "runs/april"
    if_exists: Literal["error", "rename"] = "error"
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus"], ...] = ("tensorboard",)
    prometheus_address: str = "127.0.0.1:9464"
    project: str = "april"
    show_completions: NotNegative[int] = 0
