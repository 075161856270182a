"""Checks of a recipe: every rule that involves more than the type of one setting.

Invariant: a recipe is checked whole before anything is loaded, and every problem names the setting and the remedy.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

from april.algorithms.catalogue import algorithm
from april.config.algorithm_rules import algorithm_problems
from april.config.engine_rules import engine_problems, exposure_problems, speculation_problems
from april.config.error import ConfigError
from april.config.image_rules import image_problem
from april.config.model_path import model_path_problem
from april.config.program_rules import program_problems
from april.config.ranges import range_problems
from april.config.recipe import Recipe
from april.config.settings.cluster_settings import ClusterSettings
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.environment_settings import EnvironmentSettings
from april.config.settings.trainer_settings import TrainerSettings
from april.engines.allocator_settings import unsharable_memory
from april.extras import install_command
from april.reporting.trackers import check_trackers
from april.secrets import HIDDEN, references, texts
from april.tasks.hub import path_problem

TYPICAL_WEIGHT = 0.02
"""Standard deviation with which most architectures initialise their matrices."""
HALF_SPACING = 2**-9
"""Smallest relative change that bfloat16 can represent: half the distance to the next number."""
MOST_SAMPLES = 1_000_000
"""Maximum number of samples in progress, by the scheduler's memory."""
TASKS_OF = {"verifiers": "verifiers:NAME", "nemo_gym": "nemo-gym:URL"}
"""Kinds of tasks that belong to environments of other packages."""
HOST_AND_PORT = r"[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+"


def check_recipe(recipe: Recipe, loads: bool = True) -> None:
    """Check every rule that involves more than the type of one setting, before anything is loaded.

    Args:
        loads: whether the model will be loaded; otherwise its configuration suffices.

    Raises:
        ConfigError: with a line for each broken rule.
    """
    problems = list(_problems(recipe, loads))
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(recipe: Recipe, loads: bool) -> Iterator[str]:
    for section in dataclasses.fields(recipe):
        yield from range_problems(section.name, getattr(recipe, section.name))
    yield from _secret_problems(recipe)
    yield from _rollout_problems(recipe)
    yield from _training_problems(recipe)
    yield from _precision_problems(recipe)
    yield from _trainer_problems(recipe)
    yield from _environment_problems(recipe)
    yield from program_problems(recipe)
    if problem := model_path_problem(recipe.model.path, loads):
        yield problem
    for name in ("path", "eval_path"):
        if (value := getattr(recipe.task, name)) and (problem := path_problem(value)):
            yield f"task.{name} = {value!r}: {problem}"
    if recipe.task.image_column is not None and (problem := image_problem(recipe)):
        yield f"task.image_column = {recipe.task.image_column!r}: {problem}"
    yield from _cluster_problems(recipe)
    yield from algorithm_problems(recipe)
    yield from engine_problems(recipe.engine, recipe.cluster.enabled)
    if recipe.engine.on_update == "redraft" and recipe.environment.enabled:
        yield 'engine.on_update = "redraft": not with an environment, whose answers cannot become drafts; use "keep"'
    yield from speculation_problems(recipe.engine, recipe.rollout.min_p)
    yield from exposure_problems(recipe.engine)
    try:
        check_trackers(recipe.reporting.trackers)
    except (ValueError, ModuleNotFoundError) as error:
        yield str(error)
    address = recipe.reporting.prometheus_address
    if not re.fullmatch(HOST_AND_PORT, address):
        yield f'reporting.prometheus_address = {address!r}: write "HOST:PORT"'
    if recipe.engine.weight_transfer == "adapters" and not (recipe.lora.rank and recipe.engine.engine == "vllm"):
        yield 'engine.weight_transfer = "adapters": vLLM takes them, with lora.rank above 0; else choose "disk"'
    if recipe.engine.weight_transfer == "ipc":
        yield from _ipc_problems(recipe)
    if recipe.lora.rank and find_spec("peft") is None:
        yield f"lora.rank = {recipe.lora.rank} needs peft: {install_command('lora')}"


def _secret_problems(recipe: Recipe) -> Iterator[str]:
    for name, value in texts(recipe.to_dict(), ""):
        if HIDDEN in value:
            yield (
                f"{name} = {value!r}: a secret, which was not kept: give it again, best as a reference to an "
                'environment variable, "${NAME}"'
            )
    for variable in references(recipe.environment.params):
        if variable not in os.environ:
            yield f"environment.params refers to ${{{variable}}}: set the environment variable {variable}"


def _rollout_problems(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    target = rollout.over_sampling_batch_size
    groups = rollout.rollout_batch_size if target == "auto" else max(target, rollout.rollout_batch_size)
    if groups * rollout.n_samples_per_prompt > MOST_SAMPLES:
        yield (
            f"rollout.n_samples_per_prompt = {rollout.n_samples_per_prompt}: with {groups} groups, more than "
            f"{MOST_SAMPLES:,} samples would be in progress: lower it, or the number of groups"
        )
    try:
        recipe.rollout_params()
        recipe.fault_settings()
    except ValueError as error:
        yield f"rollout.{error}"
    if rollout.policy == "april-paper" and recipe.engine.on_update != "recompute":
        yield (
            'rollout.policy = "april-paper" computes unfinished samples anew when the weights change: set '
            'engine.on_update = "recompute"'
        )
    try:
        sampling = recipe.sampling()
    except ValueError as error:
        yield f"rollout.{error}"
        return
    try:
        if (temperature := recipe.training.eval_temperature) is not None:
            replace(sampling, temperature=temperature)
    except ValueError as error:
        yield f"training.eval_{error}"


def _environment_problems(recipe: Recipe) -> Iterator[str]:
    own, task = recipe.environment, recipe.task
    if own.enabled and task.continue_assistant:
        yield "task.continue_assistant = true: not with an environment, which answers the prompt first; remove it"
    if own.path and own.tools:
        yield f"environment.tools = {own.tools!r}: path is set too; remove one of the two"
    if not own.enabled:
        if task.kind in TASKS_OF:
            yield f'task.kind = "{task.kind}": name the environment: environment.path = "{TASKS_OF[task.kind]}"'
        if task.kind == "environment":
            yield 'task.kind = "environment": name the environment, environment.path, tools, command, function or url'
        if own != EnvironmentSettings():
            yield "environment.path is not set: name the environment, or remove the section's other settings"
    elif own.task_kind and own.task_kind != task.kind:
        yield f'task.kind = "{task.kind}": environment.path = {own.path!r} needs "{own.task_kind}"'
    elif task.kind in TASKS_OF and task.kind != own.task_kind:
        yield f'task.kind = "{task.kind}": name the environment: environment.path = "{TASKS_OF[task.kind]}"'
    elif task.kind in ("environment", *TASKS_OF) and own.reward != "environment":
        yield f'environment.reward = "{own.reward}": task.kind = "{task.kind}" has no reward of its own'
    elif own.reward == "environment" and (task.reward != "task" or task.rewards):
        yield 'task.reward is set, but environment.reward = "environment": set that to "task" or "sum"'


def _training_problems(recipe: Recipe) -> Iterator[str]:
    rollout, training = recipe.rollout, recipe.training
    batch_size, updates = rollout.rollout_batch_size, training.updates_per_step
    if batch_size > 0 and updates > 0 and batch_size % updates:
        yield (
            f"training.updates_per_step = {updates} does not divide rollout_batch_size = {batch_size}: each optimizer "
            "update takes the same number of whole groups"
        )
    if training.max_tokens_per_micro_batch < rollout.max_response_length:
        yield (
            f"training.max_tokens_per_micro_batch = {training.max_tokens_per_micro_batch} is less than "
            f"rollout.max_response_length = {rollout.max_response_length}: one sample would not fit; raise it"
        )
    if training.router_replay != "off":
        yield from _replay_problems(recipe)
    if not all(0 <= beta < 1 for beta in training.betas):
        yield f"training.betas = {training.betas}: each must lie in [0, 1)"


def _replay_problems(recipe: Recipe) -> Iterator[str]:
    setting = f'training.router_replay = "{recipe.training.router_replay}"'
    if recipe.engine.engine == "vllm-inproc":
        yield f'{setting}: engine.engine = "vllm-inproc" returns no routes; choose "vllm", or set it to "off"'
    elif recipe.engine.engine != "embedded" and recipe.engine.on_update == "keep":
        yield (
            f'{setting}: engine.on_update = "keep" with servers, which do not return routes by version; choose '
            '"recompute", or the embedded engine'
        )
    if recipe.trainer.backend_name == "megatron":
        yield f'{setting}: trainer.backend = "megatron" does not replay routes; choose "fsdp2"'


def _precision_problems(recipe: Recipe) -> Iterator[str]:
    """Check that bfloat16 parameters can change at the learning rate.

    A bfloat16 weight w changes only if the update is at least half the distance to the next number, which is between
    w * 2^-8 and w * 2^-7. An AdamW update is about as large as the learning rate.
    """
    model, rate = recipe.model, recipe.training.learning_rate
    if model.dtype == "bfloat16" and model.compute_dtype == "float32":
        yield 'model.compute_dtype = "float32" with model.dtype = "bfloat16": set model.dtype = "float32"'
    if model.dtype == "bfloat16" and not recipe.lora.rank and rate < TYPICAL_WEIGHT * HALF_SPACING:
        yield (
            f'model.dtype = "bfloat16" with training.learning_rate = {rate:g}: bfloat16 rounds such updates away '
            f"(weights of about {TYPICAL_WEIGHT:g} need {TYPICAL_WEIGHT * HALF_SPACING:.0e} or more); leave "
            "model.dtype out: parameters are float32 then, and model.compute_dtype is bfloat16 on GPUs all the same"
        )


def _trainer_problems(recipe: Recipe) -> Iterator[str]:
    trainer = recipe.trainer
    if trainer.backend == "local" and trainer.processes > 1:
        yield (
            f'trainer.processes = {trainer.processes} with backend = "local", which is one process: choose "fsdp2", or '
            "leave backend out"
        )
    if trainer.backend == "megatron":
        yield from _megatron_problems(recipe)
    layout = (trainer.policy_replicas, trainer.context_parallel, trainer.tensor_parallel, trainer.expert_parallel)
    if min(layout) > 0:  # otherwise the check of ranges reports it
        yield from _division_problems(recipe)
    if trainer.cpu_offload and not trainer.sharded:
        yield 'trainer.cpu_offload = true is a setting of backend = "fsdp2"'
    if trainer.sharded and re.fullmatch(r"\w+:\d+", recipe.model.device):
        yield (
            f"model.device = {recipe.model.device!r} is one device, but each of {trainer.processes} processes needs "
            'its own: name the kind alone, like "cuda"'
        )
    if trainer.sharded and recipe.engine.own_process:
        yield "engine.own_process = true is for one training process: with several, choose servers (vllm, sglang)"
    if recipe.shares_devices:
        yield from _shared_problems(recipe)
    elif trainer.overlap is True:
        if recipe.generates_inside:
            yield (
                f"trainer.overlap = true: engine.engine = {recipe.engine.engine!r} generates in the process that "
                "trains; set engine.own_process = true (embedded), or choose servers (vllm, sglang)"
            )
        elif not recipe.overlaps:
            yield (
                "trainer.overlap = true: samples drawn during training are one update old when trained on; set "
                "rollout.partial_rollout = true and rollout.max_staleness = 1 or more"
            )


def _ipc_problems(recipe: Recipe) -> Iterator[str]:
    """Check whether servers can read the trainer's memory by CUDA IPC."""
    asked = 'engine.weight_transfer = "ipc"'
    on_ranks = recipe.cluster.enabled and recipe.shares_devices
    if recipe.engine.engine not in ("vllm", "sglang") or not (recipe.engines_here or on_ranks):
        yield f'{asked} is for vLLM and SGLang servers that april starts on the trainer\'s GPUs; choose "disk"'
    elif not recipe.shares_devices:
        yield f'{asked} needs servers on the GPUs of the trainer: set trainer.layout = "shared", or choose "disk"'
    elif not recipe.model.on_gpu or not recipe.gpus_per_engine:
        yield f'{asked}: memory is shared by CUDA IPC, and trainer or servers compute on the CPU; choose "disk"'
    # On a cluster this is checked when ranks have nodes: engines are on the GPUs of ranks in any case.
    elif not on_ranks and recipe.trainer.processes != recipe.engine.replicas * recipe.gpus_per_engine:
        yield (
            f"{asked}: each GPU of a server needs a training process, but {recipe.engine.replicas} servers have "
            f"{recipe.gpus_per_engine} GPUs each and trainer.processes = {recipe.trainer.processes}: make them equal, "
            'or choose "disk"'
        )
    if reason := unsharable_memory():
        yield f"{asked}: {reason}"


def _shared_problems(recipe: Recipe) -> Iterator[str]:
    """Check settings that exclude that engine and trainer use the same devices in turn."""
    engine, shared = recipe.engine, 'trainer.layout = "shared"'
    if engine.on_update == "keep":
        yield (
            f'engine.on_update = "keep" with {shared}: the engine releases its KV cache for each training step; use '
            '"recompute"'
        )
    if recipe.trainer.overlap is True:
        yield f"trainer.overlap = true with {shared}: generation stops while the trainer has the devices; remove one"
    if engine.urls:
        yield (
            f"engine.urls with {shared}: april has to start the servers while the trainer is off their devices; remove "
            "urls, and april starts engine.replicas servers"
        )
    if recipe.cluster.enabled:
        yield from _shared_cluster_problems(recipe)
    if engine.own_process:
        yield f"engine.own_process = true with {shared}: leave it out; the engine's process cannot release its memory"
    if engine.weight_transfer == "broadcast" and recipe.model.on_gpu:
        transfer = f'engine.weight_transfer = "broadcast" with {shared}'
        yield f'{transfer}: NCCL does not connect two processes on one GPU; use "ipc" or "disk"'
    if engine.speculative_option:
        yield (
            f"engine.server_args names {engine.speculative_option} with {shared}: servers lose the draft model's "
            "weights when they sleep; remove it"
        )


def _shared_cluster_problems(recipe: Recipe) -> Iterator[str]:
    """Check settings that exclude engines on the devices of ranks on the nodes of a cluster."""
    own, shared, each = recipe.cluster, 'trainer.layout = "shared"', recipe.ranks_per_engine
    if recipe.engine.engine == "embedded":
        yield (
            f'cluster.address with {shared}: engine.engine = "embedded" cannot release its memory on a node; choose '
            "servers (vllm, sglang), or remove cluster.address"
        )
    if own.placement == "exclude_trainer":
        yield f'cluster.placement = "exclude_trainer" with {shared}: engines are on the GPUs of ranks; remove it'
    engines = recipe.engines_beside
    if engines * each > recipe.trainer.processes:
        number = f"{engines} engine{'s' * (engines > 1)}"
        yield (
            f"trainer.processes = {recipe.trainer.processes} with {shared} on a cluster: {number} with the GPUs of "
            f"{each} rank{'s' * (each > 1)} each need {engines * each}; raise it, or lower cluster.replicas or "
            "engine.gpus_per_replica"
        )


def _megatron_problems(recipe: Recipe) -> Iterator[str]:
    """Check settings that the Megatron backend does not support."""
    trainer, rollout = recipe.trainer, recipe.rollout
    of_fsdp2 = ("policy_replicas", "context_parallel", "expert_parallel", "cpu_offload")
    for name in of_fsdp2:
        if (value := getattr(trainer, name)) != getattr(TrainerSettings, name):
            yield f'trainer.{name} = {value!r} with backend = "megatron": remove it, or choose "fsdp2"'
    if recipe.lora.rank:
        yield f'lora.rank = {recipe.lora.rank} with trainer.backend = "megatron": remove it, or choose "fsdp2"'
    with suppress(ValueError):  # `algorithm_problems` reports an unknown algorithm
        if algorithm(recipe.algorithm.algorithm).value_head:
            yield (
                f'algorithm.algorithm = {recipe.algorithm.algorithm!r} with trainer.backend = "megatron", which trains '
                'no critic: choose another algorithm, or "fsdp2"'
            )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (drawn := getattr(rollout, name)) != off:
            yield (
                f'rollout.{name} = {drawn} with trainer.backend = "megatron", whose ranks each have a part of the '
                'vocabulary and cannot sort it: remove it, or choose "fsdp2"'
            )


def _division_problems(recipe: Recipe) -> Iterator[str]:
    trainer = recipe.trainer
    context, tensor, expert = trainer.context_parallel, trainer.tensor_parallel, trainer.expert_parallel
    if trainer.processes % trainer.policy_replicas:
        yield (
            f"trainer.policy_replicas = {trainer.policy_replicas} does not divide processes = {trainer.processes}: "
            "all copies of the policy need the same number of ranks"
        )
    if trainer.processes % trainer.context_parallel:
        yield (
            f"trainer.context_parallel = {trainer.context_parallel} does not divide processes = {trainer.processes}: "
            "this many ranks share each response"
        )
    of_copy = trainer.processes // trainer.policy_replicas
    if tensor > 1 and (of_copy % tensor or trainer.processes % (context * tensor)):
        yield (
            f"trainer.tensor_parallel = {tensor} (with context_parallel = {context}) does not divide the {of_copy} "
            "processes of a copy of the policy: this many ranks share each layer"
        )
    if expert > 1 and of_copy % expert:
        yield (
            f"trainer.expert_parallel = {expert} does not divide the {of_copy} processes of a copy of the policy: "
            "this many ranks share the experts of each layer"
        )
    if expert > 1 and expert % tensor:
        yield (
            f"trainer.expert_parallel = {expert} is no multiple of tensor_parallel = {tensor}: ranks that share a "
            "layer's matrices hold different experts"
        )
    for name, size in (("tensor_parallel", tensor), ("expert_parallel", expert)):
        if size > 1 and recipe.lora.rank:
            yield (
                f"trainer.{name} = {size} with lora.rank = {recipe.lora.rank}: adapters are not divided among ranks; "
                f"leave {name} out, the frozen policy is sharded by FSDP2 all the same"
            )


def _cluster_problems(recipe: Recipe) -> Iterator[str]:
    own, engine = recipe.cluster, recipe.engine
    if not own.enabled:
        if own != ClusterSettings():
            yield (
                'cluster.address is not set: name the cluster ("auto" is the one that this machine is a node of), or '
                "remove the section's other settings"
            )
        return
    if own.address != "auto" and not re.fullmatch(HOST_AND_PORT, own.address):
        yield f'cluster.address = {own.address!r}: write "auto", or the head of the cluster as "HOST:PORT"'
    if engine.engine == "vllm-inproc":
        yield 'cluster.address is set but engine.engine = "vllm-inproc" works in the trainer: choose "vllm"'
    if engine.urls:
        yield "engine.urls names running servers, and cluster.address a cluster to start engines on: remove one of them"
    if engine.replicas != 1:
        yield f"engine.replicas = {engine.replicas}: on a cluster, cluster.replicas says how many"
    if engine.server_host != EngineSettings().server_host:
        yield "engine.server_host is set, but on a cluster servers listen on their node's address: remove it"
    if engine.stream_readers != EngineSettings().stream_readers:
        yield "engine.stream_readers is set, but on a cluster the trainer reads all streams: remove it"
    if own.rewards == "nodes" and recipe.rollout.reward_workers == 0:
        yield 'cluster.rewards = "nodes", but rollout.reward_workers = 0 computes rewards in the trainer: remove one'
    if own.ranks == "nodes" and not recipe.trainer.sharded:
        yield 'cluster.ranks = "nodes", but trainer.processes = 1 trains in one process: raise it, or remove one'
    if own.environments == "nodes" and not recipe.environment.enabled:
        yield 'cluster.environments = "nodes", but there is no environment: set environment.path or tools, or remove it'
    if own.environments == "nodes" and recipe.environment.workers == 0:
        yield 'cluster.environments = "nodes", but environment.workers = 0 keeps them in the trainer: remove one'
    if engine.own_process:
        yield "engine.own_process is set, but engines on a cluster are apart from the trainer anyway: remove it"
    if find_spec("ray") is None:
        yield f"cluster.address = {own.address!r} needs ray: {install_command('cluster')}"
